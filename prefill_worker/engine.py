"""The vLLM engine behind this worker: started with our connector, asked for one token per prompt."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefill_worker.sampling import Sampled, read_output, sampling_params
from prefill_worker.settings import PrefillSettings, parse_cpus
from transport.errors import ConfigurationError, EngineFailed, InvalidRequest
from transport.messages import Lease, Sampling
from transport.model import eos_token_ids

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Handover:
    """Where a prompt's KV goes. `transfer_id` is this worker's own name for the transfer."""

    transfer_id: str
    lease: Lease


class Engine:
    """One AsyncLLM. Requests end by themselves, by cancelling the task that awaits them, or with the engine."""

    def __init__(self, llm: AsyncLLM, model: Path) -> None:
        self._llm = llm
        self._eos = eos_token_ids(model)

    @classmethod
    def start(cls, settings: PrefillSettings, control_path: str, in_child: Callable[[], None]) -> Engine:
        """Start the engine's process; blocks until the model is loaded. Call it before any thread or loop exists.

        `in_child` runs first in the engine's process where that is forked. Raises ConfigurationError where vLLM
        refuses its settings, EngineFailed where it does not come up.
        """
        began = time.monotonic()
        _prepare_environment(settings)
        os.register_at_fork(after_in_child=_die_with_parent)
        os.register_at_fork(after_in_child=in_child)
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor import Executor

        try:
            config = _engine_args(settings, control_path).create_engine_config()
        except (ValueError, OSError) as error:
            raise ConfigurationError(f"vLLM refuses the settings: {error}") from error
        _choose_fork(config)
        try:
            llm = AsyncLLM(config, Executor.get_class(config), log_stats=False, log_requests=False)
        except Exception as error:
            raise EngineFailed(f"the engine did not start: {error}") from error
        log.info("engine started in %.1f s", time.monotonic() - began)
        return cls(llm, settings.model)

    @property
    def max_model_len(self) -> int:
        return int(self._llm.model_config.max_model_len)

    @property
    def failed(self) -> bool:
        return bool(self._llm.errored)

    async def prefill(
        self, request_id: str, token_ids: Sequence[int], sampling: Sampling, handover: Handover | None
    ) -> Sampled:
        """Prefill and sample one token. Cancelling the call aborts the request in the engine.

        Raises EngineFailed, InvalidRequest.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            params = sampling_params(sampling, self._eos, _transfer_params(handover))
            async for output in self._llm.generate(tokens_input(list(token_ids)), params, request_id):
                return read_output(output, sampling, self._eos)
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequest(str(error)) from error
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineFailed("the prefill engine died") from error
        raise EngineFailed("the prefill engine ended the request without a token")

    async def warm_up(self, tokens: int) -> None:
        """The first forward is several times slower than the others: have it before the first request."""
        greedy = Sampling(max_tokens=1, temperature=0.0)
        await self.prefill("warm-up", [0] * tokens, greedy, None)
        await self._llm.reset_prefix_cache()

    def shutdown(self) -> None:
        self._llm.shutdown()


def _transfer_params(handover: Handover | None) -> dict[str, Any] | None:
    if handover is None:
        return None
    return {"transfer_id": handover.transfer_id, "lease": handover.lease.model_dump()}


def _engine_args(settings: PrefillSettings, control_path: str) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(
        model=str(settings.model),
        served_model_name=[settings.model_name],
        skip_tokenizer_init=True,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,  # type: ignore[arg-type]  # None is the model's own
        block_size=settings.block_size,
        kv_cache_memory_bytes=int(settings.kv_cache_gib * 2**30),
        enable_prefix_caching=settings.prefix_caching,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        enforce_eager=settings.enforce_eager,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        distributed_executor_backend="uni",
        kv_transfer_config=KVTransferConfig(
            kv_connector="HawkConnector",
            kv_connector_module_path="prefill_worker.connector.hawk",
            kv_role="kv_producer",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={"control_path": control_path},
        ),
    )


def _prepare_environment(settings: PrefillSettings) -> None:
    """All that must be set before vLLM, torch or OpenMP are loaded."""
    if settings.cpus:
        os.sched_setaffinity(0, parse_cpus(settings.cpus))
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_CONFIGURE_LOGGING="0",
        OMP_NUM_THREADS=str(settings.omp_threads),
        OMP_WAIT_POLICY="PASSIVE",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        # Lets the CPU platform keep the worker inside the engine's process: half the start-up time, and no hop
        # between processes in each step.
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    logging.getLogger("vllm").setLevel(logging.INFO if settings.log_level == "debug" else logging.ERROR)


def _choose_fork(config: Any) -> None:
    """On CPU vLLM asks for spawn, for the sake of OpenMP threads that a parent may have; ours has none yet.

    A forked engine inherits the imported modules: it starts some ten seconds sooner.
    """
    if config.device_config.device_type == "cpu":
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
