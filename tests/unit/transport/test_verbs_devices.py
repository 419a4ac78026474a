"""Which NIC is used and what is said where none can be: over made-up /sys trees, without a device or pyverbs."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import json
import logging
from pathlib import Path

import pytest

from transport.backends.verbs import library, survey
from transport.backends.verbs.address import Address
from transport.backends.verbs.memlock import Memlock
from transport.backends.verbs.queue_pair import Options
from transport.backends.verbs.selection import Pick, select
from transport.backends.verbs.status import describe
from transport.backends.verbs.sysfs import Device, device_node, is_software, read_devices
from transport.errors import ConfigurationError, ProtocolError

V4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
V6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
LINK_LOCAL = "fe80:0000:0000:0000:0202:03ff:fe04:0506"
IB = "fe80:0000:0000:0000:0002:c903:0000:1491"


class Sys:
    """A /sys tree with RDMA devices."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def device(self, name: str, *, driver: str | None = "mlx5_core", node_type: str = "1: CA") -> None:
        base = f"class/infiniband/{name}"
        self.write(f"{base}/node_type", node_type)
        self.write(f"{base}/node_guid", "0202:03ff:fe04:0506")
        if driver:
            target = self.root / "bus/pci/drivers" / driver
            target.mkdir(parents=True, exist_ok=True)
            (self.root / base / "device").mkdir()
            (self.root / base / "device/driver").symlink_to(target)

    def port(
        self,
        name: str,
        number: int = 1,
        *,
        gids: tuple[tuple[str, str], ...] = (),
        state: str = "4: ACTIVE",
        link_layer: str = "Ethernet",
        lid: str = "0x0",
    ) -> None:
        base = f"class/infiniband/{name}/ports/{number}"
        for file, text in (
            *(("state", state), ("phys_state", "5: LinkUp"), ("rate", "200 Gb/sec (4X HDR)")),
            *(("link_layer", link_layer), ("lid", lid)),
        ):
            self.write(f"{base}/{file}", text)
        for index, (gid, kind) in enumerate(gids):
            self.write(f"{base}/gids/{index}", gid)
            if kind:
                self.write(f"{base}/gid_attrs/types/{index}", kind)
                self.write(f"{base}/gid_attrs/ndevs/{index}", "eth7")

    def devices(self) -> list[Device]:
        return read_devices(self.root)

    def pick(self, *names: str) -> Pick:
        [pick] = select(self.devices(), names)
        return pick


@pytest.fixture
def sys(tmp_path: Path) -> Sys:
    return Sys(tmp_path)


@pytest.fixture
def roce(sys: Sys) -> Sys:
    """One RoCE NIC with the table that such a port usually has."""
    sys.device("mlx5_0")
    table = ((LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (V4, "IB/RoCE v1"), (V4, "RoCE v2"), (V6, "RoCE v2"))
    sys.port("mlx5_0", gids=(*table, ("0000:0000:0000:0000:0000:0000:0000:0000", "")))
    return sys


def shown(pick: Pick) -> tuple[str, int, int | None]:
    return pick.device.name, pick.port.number, pick.gid_index


# ---- by default


def test_the_ipv4_mapped_roce_v2_gid_is_used(roce: Sys) -> None:
    pick = roce.pick()
    assert shown(pick) == ("mlx5_0", 1, 3)
    assert (pick.gid.ip, pick.gid.netdev) == ("10.0.0.1", "eth7")


def test_without_ipv4_a_global_ipv6_gid_is_used_before_a_link_local_one(sys: Sys) -> None:
    sys.device("mlx5_0")
    sys.port("mlx5_0", gids=((LINK_LOCAL, "RoCE v2"), (V6, "RoCE v2")))
    assert sys.pick().gid_index == 1


def test_a_link_local_gid_is_better_than_none(sys: Sys) -> None:
    sys.device("mlx5_0")
    sys.port("mlx5_0", gids=((LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2")))
    assert sys.pick().gid_index == 1


def test_infiniband_is_addressed_by_lid(sys: Sys) -> None:
    sys.device("mlx5_0")
    sys.port("mlx5_0", gids=((IB, "IB/RoCE v1"),), link_layer="InfiniBand", lid="0x1a")
    pick = sys.pick()
    assert (pick.gid_index, pick.gid.gid, pick.port.lid, pick.port.link_layer) == (None, IB, 26, "infiniband")


def test_infiniband_is_routed_globally_if_asked_by_index(sys: Sys) -> None:
    sys.device("mlx5_0")
    sys.port("mlx5_0", gids=((IB, "IB/RoCE v1"),), link_layer="InfiniBand", lid="0x1a")
    assert sys.pick("mlx5_0:1:0").gid_index == 0


def test_the_first_device_by_number_with_an_active_port_is_used(roce: Sys) -> None:
    for name in ("mlx5_10", "mlx5_2"):
        roce.device(name)
        roce.port(name, gids=((V4, "RoCE v2"),))
    roce.port("mlx5_0", state="1: DOWN")
    assert [device.name for device in roce.devices()] == ["mlx5_0", "mlx5_2", "mlx5_10"]
    assert roce.pick().device.name == "mlx5_2"


def test_the_second_port_is_used_where_the_first_is_down(roce: Sys) -> None:
    roce.port("mlx5_0", 1, state="1: DOWN")
    roce.port("mlx5_0", 2, gids=((V4, "RoCE v2"),))
    assert shown(roce.pick()) == ("mlx5_0", 2, 0)
    assert shown(roce.pick("mlx5_0")) == ("mlx5_0", 2, 0)


def test_where_no_port_can_be_used_each_says_why(roce: Sys) -> None:
    roce.port("mlx5_0", 1, state="1: DOWN")
    roce.device("iw0", node_type="4: RNIC")
    roce.port("iw0", gids=((V4, "RoCE v2"),))
    with pytest.raises(ConfigurationError) as refused:
        roce.pick()
    assert "iw0 port 1 is RNIC (iWARP)" in refused.value.message
    assert "mlx5_0 port 1 is down (physically LinkUp), not active" in refused.value.message


# ---- by name


def test_several_nics_are_used_in_the_order_named(roce: Sys) -> None:
    roce.device("mlx5_1")
    roce.port("mlx5_1", gids=((V4, "RoCE v2"),))
    assert [shown(pick) for pick in select(roce.devices(), ["mlx5_1", "mlx5_0:1:4"])] == [
        ("mlx5_1", 1, 0),
        ("mlx5_0", 1, 4),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mlx5_9", "there is no RDMA device 'mlx5_9'; there are: mlx5_0"),
        ("mlx5_0:2", "device mlx5_0 has no port 2; its ports: 1"),
        ("mlx5_0:1:9", "mlx5_0 port 1 has no GID 9; its GIDs: 0 = fe80"),
        ("mlx5_0:one", "'mlx5_0:one' names no NIC: write device, device:port or device:port:gid index"),
        ("mlx5_0:1:3:5", "'mlx5_0:1:3:5' names no NIC"),
        ("mlx5_0:-1", "'mlx5_0:-1' names no NIC"),
    ],
)
def test_a_wrong_name_says_what_there_is(roce: Sys, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        roce.pick(name)
    assert message in refused.value.message


def test_an_inactive_port_is_refused_by_name_as_well(roce: Sys) -> None:
    roce.port("mlx5_0", 1, state="2: INIT")
    with pytest.raises(ConfigurationError, match="mlx5_0 port 1 is init"):
        roce.pick("mlx5_0:1")


def test_roce_without_a_v2_gid_asks_for_an_address(sys: Sys) -> None:
    sys.device("mlx5_0")
    sys.port("mlx5_0", gids=((LINK_LOCAL, "IB/RoCE v1"),))
    with pytest.raises(ConfigurationError, match=r"no RoCE v2 GID: give its network interface an IP address; .*v1"):
        sys.pick("mlx5_0")


def test_infiniband_without_a_lid_asks_for_a_subnet_manager(sys: Sys) -> None:
    sys.device("mlx5_0")
    sys.port("mlx5_0", gids=((IB, "IB/RoCE v1"),), link_layer="InfiniBand", lid="0x0")
    with pytest.raises(ConfigurationError, match="no LID yet: is a subnet manager running"):
        sys.pick("mlx5_0")


# ---- what /sys shows


def test_a_kernel_without_rdma_says_what_to_load(sys: Sys) -> None:
    with pytest.raises(ConfigurationError, match=r"runs without RDMA .*modprobe rdma_rxe && rdma link add"):
        sys.devices()


def test_a_kernel_without_devices_says_what_to_load(sys: Sys) -> None:
    (sys.root / "class/infiniband").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="has no RDMA devices: load the NIC's driver"):
        sys.devices()


def test_a_device_is_told_from_a_software_one(roce: Sys) -> None:
    roce.device("rxe0", driver=None)
    roce.write("class/infiniband_verbs/uverbs3/ibdev", "rxe0")
    found = {device.name: device for device in roce.devices()}
    assert (found["mlx5_0"].driver, found["rxe0"].driver) == ("mlx5_core", "rdma_rxe")
    assert (is_software("mlx5_0", roce.root), is_software("rxe0", roce.root)) == (False, True)
    assert device_node("rxe0", roce.root) == found["rxe0"].node == "/dev/infiniband/uverbs3"
    assert found["mlx5_0"].node is None


def test_empty_entries_of_the_gid_table_are_left_out(roce: Sys) -> None:
    [device] = roce.devices()
    assert [gid.index for gid in device.ports[0].gids] == [0, 1, 2, 3, 4]


def test_a_survey_without_devices_says_why_and_makes_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(survey, "read_devices", lambda: read_devices(tmp_path))
    monkeypatch.setattr("transport.backends.verbs.devices.read_devices", lambda: read_devices(tmp_path))
    found = survey.survey()
    assert (found.devices, found.chosen) == ((), ())
    assert found.problem is not None
    assert "runs without RDMA" in found.problem
    assert json.loads(json.dumps(dataclasses.asdict(found)))["problem"] == found.problem


def test_a_survey_shows_devices_that_it_cannot_open(monkeypatch: pytest.MonkeyPatch, roce: Sys) -> None:
    def missing() -> library.Library:
        raise ConfigurationError("pyverbs is not installed")

    for module in ("survey", "devices"):
        monkeypatch.setattr(f"transport.backends.verbs.{module}.read_devices", roce.devices)
    monkeypatch.setattr(library, "load", missing)
    found = survey.survey()
    [device] = found.devices
    assert found.library is None
    assert found.library_problem == found.problem == "pyverbs is not installed"
    assert (device.name, device.problem, device.dmabuf.supported) == ("mlx5_0", "pyverbs is missing", None)
    assert [(port.number, port.active_mtu) for port in device.ports] == [(1, None)]


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (Memlock(None, None, exempt=False), "unlimited"),
        (Memlock(8 << 20, 8 << 20, exempt=False), "8 MiB"),
        (Memlock(64 << 10, None, exempt=False), "0.0625 MiB (hard limit unlimited)"),
        (Memlock(8 << 20, 8 << 20, exempt=True), "8 MiB, not binding: CAP_IPC_LOCK"),
    ],
)
def test_a_memlock_limit_reads_well(limit: Memlock, text: str) -> None:
    assert str(limit) == text


# ---- finding pyverbs


def built(folder: Path, suffix: str) -> Path:
    package = folder / "pyverbs"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / f"device{suffix}").touch()
    return package


def test_pyverbs_of_this_python_is_found_behind_one_of_another(tmp_path: Path) -> None:
    built(tmp_path / "old", ".cpython-27-x86_64-linux-gnu.so")
    wanted = built(tmp_path / "new", importlib.machinery.EXTENSION_SUFFIXES[0])
    assert library.find([tmp_path / "none", tmp_path / "old", tmp_path / "new"]) == wanted


def test_pyverbs_of_another_python_alone_is_named(tmp_path: Path) -> None:
    built(tmp_path, ".cpython-27-x86_64-linux-gnu.so")
    with pytest.raises(ConfigurationError, match=r"for another Python than this .*cpython-27.*own python3"):
        library.find([tmp_path])


def test_a_missing_pyverbs_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="apt install python3-pyverbs"):
        library.find([tmp_path])


def test_a_pyverbs_of_another_libibverbs_is_to_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatched() -> library.Library:
        raise ImportError("/lib/libibverbs.so.1: version `IBVERBS_PRIVATE_59' not found")

    monkeypatch.setattr(library, "_import", mismatched)
    with pytest.raises(ConfigurationError, match=r"built for another libibverbs .*IBVERBS_PRIVATE_59.*pip uninstall"):
        library.load.__wrapped__()


def test_loading_leaves_the_root_logger_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyverbs calls basicConfig when it is imported, which would give the process a second log format."""
    root = logging.Logger("root of this test")

    def configures_logging() -> library.Library:
        if not root.handlers:
            root.addHandler(logging.StreamHandler())
        raise ImportError("no device module")

    monkeypatch.setattr(library.logging, "getLogger", lambda: root)
    monkeypatch.setattr(library, "_import", configures_logging)
    with pytest.raises(ConfigurationError, match="cannot be imported"):
        library.load.__wrapped__()
    assert root.handlers == []


# ---- options and addresses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retry_count": 7}, "retry_count=7 is endless"),
        ({"rnr_retry": 7}, "rnr_retry=7 is endless"),
        ({"timeout": 0}, "timeout=0 is endless"),
        ({"timeout": 32}, "timeout=32 is not within 0 to 31"),
        ({"retry_count": -1}, "retry_count=-1 is not within 0 to 7"),
        ({"traffic_class": 256}, "out of range"),
    ],
)
def test_endless_or_impossible_patience_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Options(**options)


def test_by_default_a_dead_peer_is_known_in_seconds() -> None:
    shortest, longest = Options().detection_s
    assert (round(shortest, 2), round(longest, 2)) == (0.94, 3.76)


def test_an_address_travels_as_plain_values() -> None:
    address = Address(qp_num=17, psn=0xABCDEF, gid=V4, lid=3, mtu=4096)
    assert Address.from_list(json.loads(json.dumps(address.to_list()))) == address


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {"qp_num": 1},
        [17, 1, V4, 0],
        ["17", 1, V4, 0, 1024],
        [17, 1, "no gid", 0, 1024],
        [1 << 24, 1, V4, 0, 1024],
        [17, -1, V4, 0, 1024],
        [17, 1, V4, 1 << 16, 1024],
        [17, 1, V4, 0, 1500],
    ],
)
def test_what_is_no_address_is_refused(values: object) -> None:
    with pytest.raises(ProtocolError):
        Address.from_list(values)


@pytest.mark.parametrize(("status", "part"), [(10, "refused the write"), (12, "did not answer"), (99, "not a status")])
def test_a_status_is_said_in_words(status: int, part: str) -> None:
    assert describe(status).startswith(f"status {status}, ")
    assert part in describe(status)
