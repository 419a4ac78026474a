#!/bin/busybox sh
# First process of a guest: the host's / over 9p, read-only, below a tmpfs; then boot/guest.sh as the real init.
# From the kernel's command line: HAWK_OUT (the one folder that is shared to be written), HAWK_INIT, HAWK_PROBE.
B=/bin/busybox
fail() { echo "guest: $*"; $B poweroff -f; }

$B mount -t proc proc /proc
[ -z "$HAWK_PROBE" ] || { echo "guest: alive"; $B poweroff -f; }
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
for module in $($B cat /modules/order); do $B insmod "/modules/$module"; done
SHARE=trans=virtio,version=9p2000.L,msize=512000
$B mount -t 9p -o $SHARE,ro,cache=loose root /lower || fail "the host's / cannot be mounted"
$B mount -t tmpfs -o size=75% tmpfs /upper && $B mkdir /upper/files /upper/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /new || fail "no overlay"
$B mount -t 9p -o $SHARE out "/new$HAWK_OUT" || fail "$HAWK_OUT cannot be mounted"
for directory in proc sys dev; do $B mkdir -p /new/$directory; $B mount --move /$directory /new/$directory; done
exec $B switch_root /new /bin/bash "$HAWK_INIT"
