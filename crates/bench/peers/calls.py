#!/usr/bin/python3
# Partywall's calls from Python, on both sides. Orders and answers are those of peer.hpp.
import os
import sys
import time

import numpy
import partywall

SERVICE = "bench"


def null(call):
    return None


def touch(call):
    """Returns the last byte of an array where the client has it."""
    args = call.args
    return args.read(len(args) - 1, 1)


def serve(name):
    with partywall.Domain(name + "-server") as domain:
        with domain.serve_calls(SERVICE, {"null": null, "touch": touch}, spin=0.05):
            print("ready", flush=True)
            sys.stdin.read()


def measure(call, most, seconds):
    clock = time.perf_counter_ns
    for _ in range(most // 10 + 1):
        call()
    times = []
    end = clock() + int(seconds * 1e9)
    for _ in range(most):
        begin = clock()
        call()
        now = clock()
        times.append(now - begin)
        if now > end:
            break
    times.sort()
    at = lambda share: times[min(len(times) - 1, int(share * len(times)))]
    return f"p50={at(0.5)} p99={at(0.99)} p999={at(0.999)} max={times[-1]} mean={sum(times) // len(times)}"


def execute(client, kind, elements, most, seconds):
    if kind == "null":
        return measure(lambda: client.call("null"), most, seconds)
    if kind != "array":
        raise ValueError("unavailable: measured by the library for Rust")
    block = client.allocate(elements)
    array = numpy.frombuffer(block, dtype="u1")
    array[:] = numpy.arange(elements) % 251
    # The server has the array; apart from that, the call is the null call.
    if bytes(client.call("touch", array)) != bytes(array[-1:]):
        raise ValueError("a call returned another byte")
    return measure(lambda: client.call("null", array), most, seconds)


def call(name):
    with partywall.Domain(name + "-client") as domain:
        with domain.connect_calls(f"{name}-server:{SERVICE}", spin=0.05, heap=4 << 20) as client:
            print("ready", flush=True)
            for line in sys.stdin:
                kind, _, elements, most, milliseconds, *_ = line.split()
                try:
                    print(execute(client, kind, int(elements), int(most), float(milliseconds) / 1000), flush=True)
                except Exception as e:
                    print("failed", str(e).replace("\n", " "), flush=True)


cpu = os.environ.get("PARTYWALL_BENCH_CPU")
if cpu:
    os.sched_setaffinity(0, [int(cpu)])
{"serve": serve, "call": call}[sys.argv[1]](sys.argv[2])
