"""What the scripts have in common: cases named as zofo-benches names them, timed in a process of their own or served to who asks for turns."""

import json
import multiprocessing
import resource
import statistics
import sys
import time


def measure(group, who, tokens, rounds, threads, prepare, *arguments):
    """Runs `prepare(*arguments)` and what it returns in a process of its own, so that the peak memory is that of this case alone."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_child, args=(results, rounds, prepare, arguments))
    process.start()
    try:
        line = _wait(results, process)
    except RuntimeError as error:
        line = {"error": str(error)}
    process.join()
    if "seconds" in line:
        line["tokens_per_second"] = round(tokens / line["seconds"], 1)
    print(json.dumps({"group": group, "who": who, "threads": threads, "rounds": rounds, **line}), flush=True)


def serve(name, tokens, prepare, *arguments):
    """The other side of `turns.py`, as `report --serve` is: each line that is read asks for so many seconds of runs, at least one."""
    run = prepare(*arguments)
    run()
    print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        start, runs = time.perf_counter(), 0
        while runs == 0 or time.perf_counter() - start < float(line):
            run()
            runs += 1
        print(json.dumps({"runs": runs, "seconds": time.perf_counter() - start, "amount": tokens}), flush=True)


def _wait(results, process):
    while results.empty():
        process.join(0.1)
        if process.exitcode is not None and results.empty():
            raise RuntimeError(f"the process ended with {process.exitcode}")
    return results.get()


def _child(results, rounds, prepare, arguments):
    try:
        run = prepare(*arguments)
        run()
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
        results.put({"seconds": round(statistics.median(seconds), 5), "peak_rss_mb": round(peak * 1024 / 1e6)})
    except Exception as error:  # said in the line of this case; the others still run
        results.put({"error": f"{type(error).__name__}: {error}"})
