"""MB/s and CPU of the direct transport beside a bare gRPC stream of the same bytes, two processes on loopback.

    python -m tests.benchmarks.transport [--mib 512] [--rounds 5] [--json FILE]

Runs of both alternate, so that other work on the machine weighs on both; the ratio is the medians'.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio
import torch
import xxhash

from geotrain.base import Frame, FrameKey
from geotrain.codecs.identity import raw
from geotrain.graph.serial import tensor_spec
from geotrain.transports.direct import DirectTransport

SIZES_KIB = (16, 256, 1024, 4096)
TOKEN = b"benchmark token."
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def receiver(pipe: Connection) -> None:
    torch.set_num_threads(1)
    asyncio.run(receive(pipe))


async def receive(pipe: Connection) -> None:
    """Serves both; answers each run's last byte with one small message."""
    transport: DirectTransport
    answers: set[asyncio.Future[Any]] = set()

    def on_frame(src: str, frame: Frame) -> None:
        if frame.key.step == 1:
            answers.add(asyncio.ensure_future(transport.send(src, frame_of(torch.zeros(1), 1))))

    transport = DirectTransport("b", run="bench", token=TOKEN, on_frame=on_frame, on_lost=lambda *_: None)
    address = await transport.start()

    async def count(_: Any, context: Any) -> None:
        while len(await context.read()) > 1:
            pass
        await context.write(b"!")

    server = grpc.aio.server(options=OPTIONS)
    handlers = {"Stream": grpc.stream_stream_rpc_method_handler(count)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send((address, port))
    transport.set_roster(1, {"a": pipe.recv()}, lambda *_: None)
    while True:
        if await asyncio.to_thread(pipe.recv) is None:
            await transport.close()
            await server.stop(None)
            return
        pipe.send(cpu_s())


def frame_of(tensor: torch.Tensor, step: int) -> Frame:
    payload = raw(tensor)
    return Frame(FrameKey(1, step, 0, "x", "F"), "identity", tensor_spec(tensor), payload)


async def measure(pipe: Connection, mib: int, rounds: int) -> dict[str, dict[str, float]]:
    answered = asyncio.Event()
    transport = DirectTransport(
        "a", run="bench", token=TOKEN, on_frame=lambda src, frame: answered.set(), on_lost=print
    )
    pipe.send(await transport.start())
    address, port = pipe.recv()
    transport.set_roster(1, {"b": address}, lambda *_: None)
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
    method: Any = channel.stream_stream("/bare/Stream")

    async def ours(tensor: torch.Tensor, count: int) -> None:
        answered.clear()
        frame, last = frame_of(tensor, 0), frame_of(torch.zeros(1), 1)
        await asyncio.gather(*(transport.send("b", frame) for _ in range(count)), transport.send("b", last))
        await answered.wait()

    async def bare(tensor: torch.Tensor, count: int) -> None:
        data = tensor.numpy().tobytes()
        call = method()
        for _ in range(count):
            await call.write(data)
        await call.write(b"!")
        await call.read()

    async def timed(run: Any, tensor: torch.Tensor, count: int) -> tuple[float, float]:
        before = cpu_s() + await remote_cpu(pipe)
        start = time.perf_counter()
        await run(tensor, count)
        seconds = time.perf_counter() - start
        gigabytes = tensor.nbytes * count / 1e9
        return gigabytes * 1e3 / seconds, (cpu_s() + await remote_cpu(pipe) - before) / gigabytes

    results: dict[str, dict[str, float]] = {}
    for kib in SIZES_KIB:
        tensor = torch.rand(kib * 256)
        count = max(1, min(mib * 1024 // kib, 4096))
        runs: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": []}
        for _ in range(rounds + 1):
            runs["bare"].append(await timed(bare, tensor, count))
            runs["ours"].append(await timed(ours, tensor, count))
        row: dict[str, float] = {}
        for name, values in runs.items():
            row[f"{name}_mb_per_s"] = statistics.median(rate for rate, _ in values[1:])
            row[f"{name}_cpu_s_per_gb"] = statistics.median(cpu for _, cpu in values[1:])
        row["ratio"] = row["ours_mb_per_s"] / row["bare_mb_per_s"]
        results[f"{kib} KiB"] = row
        print(
            f"{kib:5} KiB: ours {row['ours_mb_per_s']:6.0f} MB/s {row['ours_cpu_s_per_gb']:5.2f} CPU s/GB, "
            f"bare {row['bare_mb_per_s']:6.0f} MB/s {row['bare_cpu_s_per_gb']:5.2f}, ratio {row['ratio']:.2f}",
            flush=True,
        )
    await channel.close()
    await transport.close()
    return results


def checksum_cpu_s_per_gb() -> float:
    """What the checksum costs, once at each end, of what `measure` tells as ours."""
    data = torch.rand(1 << 20).numpy()
    start = time.process_time()
    for _ in range(64):
        xxhash.xxh3_64_intdigest(data)
    return 2 * (time.process_time() - start) / (64 * data.nbytes / 1e9)


async def remote_cpu(pipe: Connection) -> float:
    pipe.send("cpu")
    return await asyncio.to_thread(pipe.recv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=512, help="MiB sent in each run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receiver, args=(there,), daemon=True)
    process.start()
    results = asyncio.run(measure(here, options.mib, options.rounds))
    results["checksum"] = {"cpu_s_per_gb": checksum_cpu_s_per_gb()}
    print(f"of which checksums, both ends: {results['checksum']['cpu_s_per_gb']:.2f} CPU s/GB")
    here.send(None)
    process.join(5)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
