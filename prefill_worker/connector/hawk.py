"""The connector as vLLM sees it: forwards its calls to the scheduler side or the worker side."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from prefill_worker.connector import seeded
from prefill_worker.connector.scheduler import SchedulerSide
from prefill_worker.connector.step import Step
from prefill_worker.connector.worker import WorkerSide
from prefill_worker.control.engine_end import EngineEnd
from prefill_worker.control.messages import Held, Joined
from transport.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class StepMetadata(KVConnectorMetadata):
    step: Step


class HawkConnector(KVConnectorBase_V1, SupportsHMA):
    """`kv_connector_extra_config`: `control_path`, the service's socket.

    Raises ConfigurationError for models with other than full attention over one kind of KV blocks.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check_attention(kv_cache_config)
        path = self._kv_transfer_config.get_from_extra_config("control_path", None)
        if role == KVConnectorRole.WORKER:
            seeded.install()
            layers = vllm_config.compilation_config.static_forward_context
            self._worker = WorkerSide(path, vllm_config.parallel_config.rank, layers)
        else:
            # Ctrl-C in a terminal reaches the whole process group: the service drains, and ends us afterwards.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            joined = Joined(part="scheduler", rank=0, pid=os.getpid())
            self._control = EngineEnd(path, joined, lambda message: None)
            self._scheduler = SchedulerSide(self._say_held)

    def _say_held(self, requests: int, blocks: int) -> None:
        self._control.send(Held(requests=requests, blocks=blocks))

    # ---- scheduler side

    def on_new_request(self, request: Request) -> None:
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        return StepMetadata(self._scheduler.step(scheduler_output))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        handed_over = request.status.name == "FINISHED_LENGTH_CAPPED"
        return self._scheduler.finish(request.request_id, handed_over, len(block_ids))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.release(connector_output.finished_sending or set())

    def has_pending_block_frees(self) -> bool:
        """Better to wait for a push than to preempt: blocks come back when it is acknowledged or given up."""
        return self._scheduler.holds_blocks

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._worker.before_step(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self._worker.after_step(metadata.step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._worker.collect(finished_req_ids) or None, None

    # ---- both

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER:
            self._worker.close()
        else:
            self._control.close()


def _check_attention(kv_cache_config: KVCacheConfig) -> None:
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec) or specs[0].sliding_window is not None:
        raise ConfigurationError(f"only full attention over one kind of KV blocks can be handed over, got {specs}")
