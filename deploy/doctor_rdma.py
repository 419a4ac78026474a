"""`hawk doctor rdma`: the RDMA devices of this machine, which of them the verbs data plane would use, and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from deploy.finding import Finding, table
from transport.backends.verbs.devices import Nic
from transport.backends.verbs.survey import DeviceSurvey, PortSurvey, Survey, survey

LITTLE_MEMLOCK = 64 << 20
"""Distributions' defaults (64 KiB, 8 MiB) are below: no KV pool fits."""
RAISE_MEMLOCK = (
    "ulimit -l unlimited; as a systemd service LimitMEMLOCK=infinity; "
    "in a container --ulimit memlock=-1 --cap-add IPC_LOCK"
)
NONE_NEEDED = "only the verbs data plane needs RDMA: shm (one host) and nixl (any network) work without"


def main(argv: Sequence[str]) -> int:
    """0 when the verbs data plane can be used here, 1 when not."""
    parser = argparse.ArgumentParser(prog="hawk doctor rdma", description=__doc__)
    parser.add_argument("--json", action="store_true", help='print {"ok": …, "findings": […], "survey": {…}}')
    parser.add_argument(
        "nics", nargs="*", metavar="NIC", help="device[:port[:gid index]], as the roles are given: mlx5_0, mlx5_0:1:3"
    )
    args = parser.parse_args(argv)
    seen = survey(args.nics)
    findings = judge(seen)
    ok = all(finding.level != "fail" for finding in findings)
    if args.json:
        report = {"ok": ok, "findings": [asdict(finding) for finding in findings], "survey": asdict(seen)}
        print(json.dumps(report, indent=2))
        return 0 if ok else 1
    print(table(findings))
    for device in seen.devices:
        print("\n" + "\n".join(describe(device, seen.chosen)))
    if not ok:
        print(f"\nNot usable as it is; {NONE_NEEDED}.")
    return 0 if ok else 1


def summary() -> Finding:
    """The one line that `hawk doctor` has for RDMA: never a failure, since two data planes do without."""
    seen = survey()
    if not seen.devices:
        return Finding("rdma", "ok", "no RDMA devices; shm and nixl need none")
    if bad := [finding for finding in judge(seen) if finding.level == "fail"]:
        advice = "hawk doctor rdma says what to do; shm and nixl work without"
        return Finding("rdma", "warn", "; ".join(f"{finding.check}: {finding.found}" for finding in bad), advice)
    return Finding("rdma", "ok", f"{'; '.join(map(name, seen.chosen))} (more: hawk doctor rdma)")


def judge(seen: Survey) -> list[Finding]:
    """What decides whether verbs can be used, each with what to do about it."""
    findings = [_pyverbs(seen), _use(seen), _memlock(seen)]
    if seen.chosen:
        findings.append(_dmabuf(seen))
    return [*findings, _peer_memory(seen), _modules(seen)]


def _pyverbs(seen: Survey) -> Finding:
    if seen.library is None:
        return Finding("pyverbs", "fail", "cannot be used", seen.library_problem or "")
    return Finding("pyverbs", "ok", seen.library)


def _use(seen: Survey) -> Finding:
    if not seen.chosen:
        found = "nothing: no RDMA devices" if not seen.devices else "none of the devices below"
        return Finding("use", "fail", found, seen.problem or "")
    return Finding("use", "ok", "; ".join(map(name, seen.chosen)), "because: " + "; ".join(seen.why))


def _memlock(seen: Survey) -> Finding:
    limit = seen.memlock
    if limit.soft is None or limit.exempt:
        return Finding("memlock", "ok", str(limit))
    level = "fail" if limit.soft < LITTLE_MEMLOCK else "warn"
    return Finding("memlock", level, f"{limit}: KV pool and staging memory have to fit", RAISE_MEMLOCK)


def _dmabuf(seen: Survey) -> Finding:
    """Of the devices that would be used."""
    used = {nic.device for nic in seen.chosen}
    devices = [device for device in seen.devices if device.name in used]
    said = "; ".join(f"{device.name}: {dmabuf(device)}" for device in devices)
    if all(device.dmabuf.supported for device in devices):
        return Finding("dma-buf", "ok", said)
    return Finding("dma-buf", "warn", said, "memory of GPUs and NPUs then goes through the host (kv_path host)")


def _peer_memory(seen: Survey) -> Finding:
    return Finding("peer memory", "ok", ", ".join(seen.peer_memory) or "no module loaded (dma-bufs need none)")


def _modules(seen: Survey) -> Finding:
    return Finding("kernel", "ok", f"{seen.kernel}; {', '.join(seen.modules) or 'no RDMA modules'}")


def name(nic: Nic) -> str:
    """ "rxe0 port 1, GID 1 ::ffff:10.0.0.1 (RoCE v2, 10.0.0.1), MTU 4096 bytes, eth0"."""
    if nic.gid_index is None:
        address = f"LID {nic.lid}"
    else:
        address = f"GID {nic.gid_index} {nic.gid} ({', '.join(filter(None, (nic.gid_type, nic.ip)))})"
    return ", ".join(filter(None, (f"{nic.device} port {nic.port}", address, f"MTU {nic.mtu} bytes", nic.netdev)))


def describe(device: DeviceSurvey, chosen: Sequence[Nic]) -> list[str]:
    """A device with its ports and their GID tables; an arrow marks what would be used."""
    lines = [f"{device.name}: {device.driver}, {device.node_type}, GUID {device.node_guid}, {device.node or 'no node'}"]
    if device.problem:
        lines.append(f"  cannot be opened: {device.problem}")
    lines.append(f"  dma-buf: {dmabuf(device)}")
    for port in device.ports:
        lines += _describe_port(port, [nic for nic in chosen if (nic.device, nic.port) == (device.name, port.number)])
    return lines


def _describe_port(port: PortSurvey, chosen: Sequence[Nic]) -> Iterator[str]:
    mtu = "MTU unknown" if port.active_mtu is None else f"MTU {port.active_mtu} bytes (at most {port.max_mtu})"
    facts = [f"{port.state} ({port.physical_state})", port.link_layer, port.rate, mtu, f"LID {port.lid}"]
    by_lid = any(nic.gid_index is None for nic in chosen)
    yield f"{'→' if by_lid else ' '} port {port.number}: {', '.join(facts)}"
    used = {nic.gid_index for nic in chosen}
    for gid in port.gids:
        mark = "→" if gid.index in used else " "
        facts = [gid.type, *filter(None, (gid.ip, gid.netdev))]
        yield f"  {mark} GID {gid.index}: {gid.gid} ({', '.join(facts)})"


def dmabuf(device: DeviceSurvey) -> str:
    """ "yes", "no" or "unknown", and how that is known."""
    answer = {True: "yes", False: "no", None: "unknown"}[device.dmabuf.supported]
    return f"{answer} ({device.dmabuf.how_known})"
