#!/bin/sh
# hawk: stand-in for riscv-tt-elf-g++, Tenstorrent's SFPI compiler, on simulated and mock devices.
#
# ttnn compiles a device's firmware when it opens the device, and kernels when an op first runs. Its wheel also holds
# compiled firmware, under names that are hashes of everything that could matter, and never ours. So:
#  - firmware is answered with the wheel's, of the machine with the same number of DRAM and L1 banks;
#  - a kernel for the mock device, which runs nothing, is one instruction (kernel.py);
#  - a kernel for the simulator is refused: it would hang there;
#  - a real card is refused altogether.
# prepare.py installs this file, and beside it firmware/DRAM-L1/ and kernel.elf.

fail() {
    echo "hawk's stand-in for the SFPI compiler: $*" >&2
    exit 1
}

here=$(dirname "$0")
core=$(basename "$PWD")
compiles='' kind=kernel dram='' l1='' output='' dependencies='' input='' before=''
for argument in "$@"; do
    case $argument in
    --version | -dumpversion) echo "riscv-tt-elf-g++ 15.1.0" && exit ;;
    -c | c++-header) compiles=yes ;;
    -DFW_BUILD) kind=firmware ;;
    -DNUM_DRAM_BANKS=*) dram=${argument#*=} ;;
    -DNUM_L1_BANKS=*) l1=${argument#*=} ;;
    *.cc | *.cpp | *.h | "$PWD"/*.o) [ "$before" = -o ] || input=$argument ;;
    esac
    case $before in
    -o) output=$argument ;;
    -MF) dependencies=$argument ;;
    esac
    before=$argument
done
[ "$output" ] || fail "cannot do: $*"
[ "${TT_METAL_SIMULATOR:-}${TT_METAL_MOCK_CLUSTER_DESC_PATH:-}" ] ||
    fail "a card needs the real one: delete $0, then run ttnn's download_sfpi.py"

if [ "$compiles" ]; then
    echo "$kind $dram-$l1" >"$output" # for the link below
    [ -z "$dependencies" ] || echo "$output: $input" >"$dependencies"
    exit
fi
[ -f "$input" ] || fail "nothing of this directory to link: $*"
read -r kind banks <"$input"
if [ "$kind" = firmware ]; then
    [ -d "$here/firmware/$banks" ] || fail "ttnn's wheel has no firmware for a Blackhole of $banks DRAM-L1 banks"
    exec cp "$here/firmware/$banks/$core/$core.elf" "$output"
fi
[ -z "${TT_METAL_SIMULATOR:-}" ] || fail "the simulator runs no kernels without the real one (kernel in $PWD)"
exec cp "$here/kernel.elf" "$output"
