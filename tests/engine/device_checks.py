"""Registration and its refusal from rank to rank (case 14): workers with a device, the real daemon, vLLM's own way of
bringing the workers' reports to the scheduler. Run by `check_runner.py`."""

import contextlib
import pickle
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from check_runner import check, run_checks
from toy_device import ToyDevice
from toy_engine import NUM_BLOCKS, ToyEngine, keys_of, wait_until
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvoffload_engine.connector import KVOffloadConnector
from kvoffload_engine.transfer.cuda import DeviceTransfer, VllmDevice
from kvoffload_engine.transfer.pinning import Pinning
from kvoffload_engine.worker import KVOffloadWorker

RANKS = 8


def report_of(worker: KVOffloadWorker, job_id: int) -> ModelRunnerOutput:
    """What this worker's process sends to the scheduler after a step in which a job of its own was done."""
    connector = object.__new__(KVOffloadConnector)
    connector._inert_because, connector._failed_loads = "", {}
    connector.connector_worker = SimpleNamespace(
        worker=worker, build_connector_worker_meta=lambda: OffloadingWorkerMetadata(completed_jobs={job_id: 1})
    )
    report = KVConnectorOutput(kv_connector_worker_meta=connector.build_connector_worker_meta())
    output = ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=report)
    return pickle.loads(pickle.dumps(output))


def tell_scheduler(engine: ToyEngine) -> None:
    """All workers' reports of the engine's last job, together, as the executor brings them."""
    outputs = [report_of(worker, engine.jobs) for worker in engine.workers]
    together = KVOutputAggregator(len(outputs)).aggregate(outputs)
    connector = object.__new__(KVOffloadConnector)
    connector._inert_because = ""
    connector.connector_scheduler = SimpleNamespace(manager=engine.manager, update_connector_output=lambda output: None)
    connector.update_connector_output(together.kv_connector_output)


def check_modes(socket_path: str, first_key: int, refused: set[int]) -> None:
    devices = [ToyDevice("not supported" if rank in refused else "") for rank in range(RANKS)]
    transfers = [DeviceTransfer(device) for device in devices]
    with ToyEngine(socket_path, ranks=RANKS, identity=bytes([first_key]) * 32, transfers=transfers) as engine:
        keys = keys_of(*range(first_key, first_key + 16))
        for index in range(16):
            engine.fill(index, 5 * index)
        assert engine.store("s", keys, list(range(16))) == keys
        wait_until(
            lambda: all(device.registered or transfer.registration_refused
                        for device, transfer in zip(devices, transfers, strict=True))
        )  # fmt: skip
        assert {rank for rank, device in enumerate(devices) if not device.registered} == refused
        tell_scheduler(engine)
        wait_until(lambda: engine.is_hit(keys))
        slots = pickle.loads(pickle.dumps(engine.prepare_load("l", keys)))
        engine.step()
        assert engine.submit_load("l", slots, list(range(32, 48))) == {}
        assert all(engine.holds(32 + index, 5 * index) for index in range(16))
        assert all(bool(device.registered) != bool(refused) for device in devices)
        assert engine.store("t", keys_of(first_key + 16), [NUM_BLOCKS - 1]) == keys_of(first_key + 16)
        for transfer in transfers:
            transfer._pinning._queue.put(0)  # an extent wanted once more
        wait_until(lambda: all(transfer._pinning._queue.empty() for transfer in transfers))
        assert all(bool(device.registered) != bool(refused) for device in devices)


@check
def when_three_ranks_of_eight_register_no_pages_the_next_job_finds_none_registered_anywhere(socket_path: str) -> None:
    check_modes(socket_path, 10, {2, 5, 7})


@check
def when_every_rank_registers_its_pages_they_stay_so(socket_path: str) -> None:
    check_modes(socket_path, 40, set())


@check
def pages_are_registered_on_the_workers_own_device_whichever_thread_does_it(socket_path: str) -> None:
    """torch's own calls, on a machine without a device: what is recorded is the device that is current in them."""
    current, seen = threading.local(), []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, current.index = getattr(current, "index", 0), index
        yield
        current.index = before

    def record(*arguments: int) -> int:
        seen.append((len(arguments), getattr(current, "index", 0)))
        return 0

    cudart = SimpleNamespace(cudaHostRegister=record, cudaHostUnregister=record)
    with (  # device 3 is current in the thread of rank 3's worker
        mock.patch.object(torch.cuda, "current_device", return_value=3),
        mock.patch.object(torch.cuda, "device", device),
        mock.patch.object(torch.cuda, "cudart", return_value=cudart),
    ):
        pinning = Pinning(base_address=0, extent_bytes=1, register=(vllm_device := VllmDevice()).register,
                          unregister=vllm_device.unregister)  # fmt: skip
        pinning.want({1})
        wait_until(lambda: pinning.num_registered == 1)
        revoker = threading.Thread(target=pinning.revoke, args=({1},))  # the connector's, as the other is Pinning's
        revoker.start()
        revoker.join()
        pinning.close()
    assert seen == [(3, 3), (1, 3)]


if __name__ == "__main__":
    run_checks(with_control=False)
