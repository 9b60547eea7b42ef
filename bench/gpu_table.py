"""The table at the end of `make gpu`: each figure with its aim and its floor or peer."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Row:
    """A line of the table. The aims are for an H100 or H200."""

    figure: str
    value: str
    aim: str = ""
    reached: bool | None = None  # None: no aim
    beside: str = ""  # floor or peer


def train(x: Any) -> Iterator[Row]:
    for name, chain in x["chains"].items():
        is_done = not any(command["code"] for command in chain)
        value = f"{len(chain)} commands" if is_done else f"FAILED: {chain[-1]['command']}"
        seconds = f"{chain[-1]['seconds_since_start']:.0f} s"
        yield Row(f"train, {name}", value, "no failure", is_done, seconds)


def ceilings(x: Any) -> Iterator[Row]:
    yield Row(
        "copy bandwidth",
        f"{x['copy_bytes_per_second'] / 1e9:,.0f} GB/s",
        beside="data sheets: H100 3,350, H200 4,800",
    )
    name = x["machine"]["dtype"].removeprefix("torch.")
    yield Row(
        f"{name} GEMM",
        f"{x['matrix_flops_per_second'] / 1e12:,.1f} TFLOP/s",
        beside="data sheets: 989 in bf16",
    )


def token_loss(x: Any) -> Iterator[Row]:
    for part, error in x["failed"].items():
        yield Row(f"loss, {part}", "FAILED", "no failure", False, error)
    for name, case in (x["logits"] | x["other_vocabularies"]).items():
        yield from loss_on_logits(
            f"{case['tokens']} x {case['vocabulary']} {name.split()[0]}", case
        )
        yield from failures(case)
    for name, case in x["linear"].items():
        yield from linear_loss(f"{of_linear(case)} {name}", case)
        yield from failures(case)
    for case in x["linear_products"].values():
        times = case["milliseconds"]
        for figure, of in {
            "logits in float32": "logits",
            "weight's gradient, addmm": "weight's gradient, parts and add",
        }.items():
            if figure in times and of in times:
                ratio = f"{times[figure] / times[of]:.2f} x"
                yield Row(f"  {figure}", f"{times[figure]:.2f} ms", beside=f"{ratio} {of}")
        yield from failures(case)
    for name, case in x["linear_logprobs"].items():
        ms, beside = case["milliseconds"]["ours"], f"{case['tflops']:.0f} TFLOP/s of GEMMs"
        figure = f"linear log-probs, {of_linear(case)} {name}"
        yield Row(figure, f"{ms:.1f} ms", "< 24.9 ms", ms < 24.9, beside)
    for name, case in x["divergence"].items():
        ms, times = case["milliseconds"].get("ours"), case["times_ours"].get("eager")
        if ms is not None:
            figure, reached = f"divergence, {of_linear(case)} {name}", times and times >= 1
            beside = f"{times:.1f} x" if times else ""
            yield Row(figure, f"{ms:.1f} ms", "<= eager", reached, beside)
        yield from failures(case)


def of_linear(case: Any) -> str:
    return f"{case['tokens']} x {case['hidden_size']} x {case['vocabulary']}"


def failures(case: Any) -> Iterator[Row]:
    for name, error in case["failed"].items():
        yield Row(f"  {name}", "failed", "", False if name.startswith("ours") else None, error)


def loss_on_logits(size: str, case: Any) -> Iterator[Row]:
    times, share = case["milliseconds"], case["of_copy_bandwidth"].get("ours")
    if share is not None:
        beside = ", ".join(f"{x} {times[x]:.2f}" for x in ("copy", "ours", "eager") if x in times)
        yield Row(
            f"loss, {size}", f"{share:.0%} of a copy", ">= 85%", share >= 0.85, f"ms: {beside}"
        )
    if (host := case["host_microseconds"]) is not None:
        yield Row("  time on the host", f"{host:.0f} us", "<= 40 us", host <= 40)
    if (liger := case["times_ours"].get("liger-kernel GRPO")) is not None:
        yield Row("  liger-kernel's GRPO loss", f"{liger:.2f} x ours", ">= 1.7", liger >= 1.7)
    peak = case["peak_bytes_per_element"].get("ours, in place")
    # the gradient overwrites the logits, so that all new memory is temporary
    if peak is not None:
        yield Row("  in place, new memory", f"{peak:.2f} bytes/element", "no [T, V]", peak < 0.1)


def linear_loss(size: str, case: Any) -> Iterator[Row]:
    useful = case["useful_tflops"]
    if "ours" in useful:
        beside = f"GEMM {case['matrix_product_tflops']:.1f}"
        beside += f", eager {useful['eager']:.1f}" if "eager" in useful else ""
        reached = useful["ours"] >= 0.85 * case["matrix_product_tflops"]
        value = f"{useful['ours']:.1f} TFLOP/s"
        yield Row(f"linear, {size}", value, ">= 85% of GEMM", reached, beside)
    peaks, chunk = case["peak_mib"], case["chunk_mib"]
    if peaks.get("ours") is not None:
        own, aim = peaks["ours"] - case["gradients_mib"], f"<= {chunk:,.0f} MiB, a chunk"
        beside = f"eager {peaks['eager']:,.0f}" if "eager" in peaks else ""
        yield Row("  besides its gradients", f"{own:,.0f} MiB", aim, own <= 1.05 * chunk, beside)


def rollout(x: Any) -> Iterator[Row]:
    for case in x["cases"].values():
        rows = case["prompts"] * case["samples"]
        for figure, name in {
            f"rollout, {rows:,} rows": "native",
            "  with torch.compile": "native, compiled",
        }.items():
            if side := case["sides"].get(name):
                rate = side["tokens_per_second"]
                aim, reached = (">= 6,000,000", rate >= 6e6) if rows >= 4096 else ("", None)
                beside = f"floor {case['floor_milliseconds']:.1f} of {side['milliseconds']:.1f} ms"
                yield Row(figure, f"{rate:,.0f} tokens/s", aim, reached, beside)


def rollout_peer(x: Any) -> Iterator[Row]:
    for case in x["cases"].values():
        side = case["sides"]["transformers"]
        yield Row(
            "  transformers' generate",
            f"{side['tokens_per_second']:,.0f} tokens/s",
            beside=f"{side['times_native']:.1f} x ours",
        )


def whole_step(x: Any) -> Iterator[Row]:
    case = x["cases"]["step17"]
    name = f"whole step, 17x17, {case['prompts']} x {case['rollouts']}"
    for figure, timed in {name: case, "  with torch.compile": case.get("compiled")}.items():
        if timed:
            ms, stages = timed["step_milliseconds"], timed["milliseconds_by_stage"]
            beside = f"floor {timed['floor_milliseconds']:.1f}, rollout {stages['rollout']:.0f}, "
            beside += f"update {stages['update']:.0f}, prompts {stages['prompts']:.0f}"
            yield Row(figure, f"{ms:,.0f} ms", "<= 100 ms", ms <= 100, beside)


# without and with recomputed activations; the output matrix has a larger share of the smaller
# policy's work
MFU_AIMS = {"qwen-0.5b": (0.55, 0.4), "qwen-1.5b": (0.62, 0.48)}


def qwen(x: Any) -> Iterator[Row]:
    for name, case in x["cases"].items():
        shared, padded = (case["layouts"].get(layout) for layout in ("shared", "padded"))
        mfu, aim = shared["model_flops_utilisation"], MFU_AIMS[name][case["recomputes"]]
        beside = f"floor {shared['floor_milliseconds']:,.0f} of {shared['milliseconds']:,.0f} ms"
        beside += f", padded {padded['times_shared']:.2f} x" if padded else ""
        yield Row(f"update, {name}", f"{mfu:.0%} of GEMM", f">= {aim:.0%}", mfu >= aim, beside)


def advantages(x: Any) -> Iterator[Row]:
    times = x["microseconds"]["1024x16"]
    nothing = times["floor: an operator that does nothing"]
    for name, peer in (("grpo", "grpo by view, mean, std"), ("maxpo", "maxpo by matrix")):
        beside = (
            f"an operator {nothing:.1f} us; by {peer.partition(' by ')[2]} "
            f"{times[f'peer: {peer}'] / times[name]:.1f} x"
        )
        yield Row(f"{name}, one call", f"{times[name]:.1f} us", beside=beside)
    for name, in_graph in x["gpu"]["microseconds_in_a_graph"].items() if "gpu" in x else ():
        count = x["gpu"]["launches"].get(name)
        yield Row(f"  {name}, 1024 x 16, in a graph", f"{in_graph:.2f} us, {count} launches")


def profiles(x: Any) -> Iterator[Row]:
    for name, case in x["profiles"].items():
        longest = case["kernels"][0]
        beside = f"longest, {longest['share']:.0%}: {longest['name']:.60}"
        yield Row(
            f"profile, {name}",
            f"{case['busy']:.0%} busy",
            beside=f"{case['launches']:,} launches; {beside}",
        )


def counters(x: Any) -> Iterator[Row]:
    for name, kernel in x["kernels"].items():
        of_peak = (
            f"memory {kernel['memory_percent']:.0f}%, multiprocessors "
            f"{kernel['multiprocessor_percent']:.0f}% of their peak"
        )
        beside = f"{of_peak}, {kernel['registers']:.0f} registers"
        yield Row(
            f"counters, {short_name(name)}", f"{kernel['nanoseconds'] / 1e3:,.1f} us", beside=beside
        )


def short_name(kernel: str) -> str:
    """Return a kernel's name without return type, namespaces and arguments:
    `attend_to_own<__nv_bfloat16, 2>`.
    """
    plain = (
        kernel.replace("(anonymous namespace)::", "").replace("<unnamed>::", "").partition("(")[0]
    )
    function, bracket, arguments = plain.partition("<")
    return f"{function.rpartition('::')[2]}{bracket}{arguments}"[:40]


def trl(x: Any) -> Iterator[Row]:
    seconds = x["seconds"]
    yield Row(
        "TRL's GRPOTrainer, that step",
        f"{seconds['trl']:.2f} s",
        beside=f"{x['ratio']:.1f} x ours, {seconds['ours']:.2f} s",
    )


SECTIONS: dict[str, Callable[[Any], Iterator[Row]]] = {
    "ceilings": ceilings,
    "train": train,
    "token_loss": token_loss,
    "rollout": rollout,
    "rollout_peer": rollout_peer,
    "whole_step": whole_step,
    "qwen_0.5b": qwen,
    "qwen_1.5b": qwen,
    "advantages": advantages,
    "profiles": profiles,
    "counters": counters,
    "rollout_compiled": rollout,
    "whole_step_compiled": whole_step,
    "token_loss_peers": token_loss,
    "trl": trl,
}


def rows(steps: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return the rows of all steps from their records.

    A failed step has a row that says so, then the figures it printed before. A dry run has no aims.
    """
    table = []
    for name, record in steps.items():
        figures = record.get("figures")
        if record["state"] == "absent":
            table.append(Row(name, "not run", beside=record["why"]))
        elif name not in SECTIONS:
            counted = ", ".join(f"{number} {kind}" for kind, number in (figures or {}).items())
            is_done = record["state"] == "done"
            value = ", ".join(filter(None, ["" if is_done else "FAILED", counted])) or "done"
            table.append(Row(name, value, "no failure", is_done, _why(record)))
        else:
            if record["state"] != "done":
                table.append(Row(name, "FAILED", "", False, _why(record)))
            of_step = list(SECTIONS[name](figures)) if figures else []
            if figures and figures["machine"]["device"] == "cpu":
                of_step = [replace(row, aim="", reached=None) for row in of_step]
            table += of_step
    return table


def _why(record: Mapping[str, Any]) -> str:
    return "" if record["state"] == "done" else f"{record['state']}: {record['why']}"


def lines(table: list[Row]) -> list[str]:
    answers = {True: "yes", False: "NO", None: ""}
    cells = [("figure", "measured", "aim", "reached", "floor or peer")]
    cells += [(row.figure, row.value, row.aim, answers[row.reached], row.beside) for row in table]
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    return [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in cells
    ]
