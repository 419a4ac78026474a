# Init of a guest: sets up links and Soft-RoCE, runs the command, leaves its exit code behind, powers off.
# $HAWK_OUT/guest.env, written by machine.py, says what is wanted.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 TERM=dumb
. "$HAWK_OUT/guest.env"

mount -t tmpfs tmpfs /run
mkdir -p /dev/pts /dev/shm /lib/modules
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount --bind "$HAWK_MODULES" /lib/modules
ulimit -l unlimited
ip link set lo up

modprobe -a ib_uverbs rdma_ucm rdma_rxe
case $HAWK_LINK in
    lo) device=lo ;;
    veth)
        modprobe veth
        ip link add veth0 type veth peer name veth1
        ip link set veth1 mtu 9000 up
        device=veth0
        ;;
    wire)  # the network card that machine.py has joined to another guest's
        modprobe virtio_net
        until device=$(cd /sys/class/net && echo e*) && [ "$device" != 'e*' ]; do sleep 0.1; done
        ;;
esac
[ "$device" = lo ] || ip address add "$HAWK_ADDRESS/24" dev "$device"
[ "$device" = lo ] || ip link set "$device" mtu 9000  # so that RDMA packets carry 4096 bytes
ip link set "$device" up
until [ "$(<"/sys/class/net/$device/carrier")" = 1 ]; do sleep 0.1; done
rdma link add rxe0 type rxe netdev "$device"
until [ -e /dev/infiniband/uverbs0 ]; do sleep 0.1; done

cd "$HAWK_DIRECTORY"
read -r HAWK_BOOT_SECONDS _ </proc/uptime
export HAWK_BOOT_SECONDS
bash "$HAWK_OUT/command.sh" </dev/null >"$HAWK_OUT/output.log" 2>&1
echo $? >"$HAWK_OUT/exit_code"
sync
echo o >/proc/sysrq-trigger
sleep 60
