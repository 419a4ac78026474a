"""What lets ttnn open a simulated or a mock Blackhole on a machine without a card and without Tenstorrent's compiler.

ttnn compiles firmware and kernels when they are first needed, with a compiler (SFPI) that is no Python package. The
simulator needs firmware only, the mock device needs files that look compiled; `compiler.sh` provides both.
"""
