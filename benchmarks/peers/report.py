"""What the runner measured, as figures and as Markdown."""

import math
import pathlib
import statistics

# All contenders start from the same weights and see the same minibatches. Until the loss leaves its plateau near ln 10,
# within the second epoch, their losses differ by rounding alone, some 1e-7. A learning rate of 0.19, another order of
# the samples or max pooling make 1e-5 and more. Leaving the plateau then multiplies rounding to some percent.
first_epoch_tolerance = 1e-6
last_epoch_tolerance = 0.05
# At this learning rate the test accuracy swings by 0.03 and more from one epoch to the next, so the mean of three counts.
accuracy_tolerance = 0.03

# (what is said, the faster, the others, of which the best counts, the goal)
ratios = [
    ("lockstep, 2 ranks, against PyTorch on both cores", "lockstep-2", ["pytorch-2", "ddp"], 1.6),
    ("lockstep, 2 ranks, grains of 32, against PyTorch on both cores", "lockstep-grain", ["pytorch-2", "ddp"], 3.0),
    ("lockstep, 2 ranks, against torch.compile on both cores", "lockstep-2", ["compile", "compile-ddp"], 1.3),
    ("lockstep, 2 ranks, against 1 rank", "lockstep-2", ["lockstep-1"], 1.8),
    ("lockstep, 2 ranks in 2 processes, against PyTorch DDP", "lockstep-processes", ["ddp"], None),
    ("lockstep, 2 ranks, against MXNet's two contexts", "lockstep-2", ["mxnet-contexts"], None),
    ("PyTorch, 2 threads, against 1 thread", "pytorch-2", ["pytorch-1"], None),
    ("the limit, against lockstep, 2 ranks", "limit-2", ["lockstep-2"], None),
    ("lockstep on the GPU, against eager PyTorch", "lockstep-gpu", ["pytorch-gpu"], None),
    ("lockstep's CUDA graph, against PyTorch's", "lockstep-graph", ["pytorch-graph"], None),
    ("lockstep's CUDA graph, against lockstep without", "lockstep-graph", ["lockstep-gpu"], None),
    ("lockstep, 2 ranks on one GPU, against 1 rank", "lockstep-2-gpu", ["lockstep-gpu"], None),
    ("lockstep's CUDA graph, 2 ranks on one GPU, against 1 rank", "lockstep-2-graph", ["lockstep-graph"], None),
]


# Figures


def without_folders(text):
    """A command's word without the path that it has on this machine."""
    return pathlib.Path(text).name if text.startswith("/") else text


def figures(contender, settings):
    """One contender's results as plain values; without times if it has no figures, and then with the reason."""
    row = {
        "key": contender.key,
        "name": contender.name,
        "kind": contender.kind,
        "command": [without_folders(str(word)) for word in contender.command],
        "unavailable": contender.unavailable,
        "rounds": contender.rounds,
    }
    timed = [epoch["seconds"] for metrics in contender.rounds for epoch in metrics[settings["warm_up_epochs"]:]]
    if timed and not contender.unavailable:
        row["best_seconds"] = min(timed)
        row["median_seconds"] = statistics.median(timed)
        row["samples_per_second"] = settings["samples"] / min(timed)
        compiled = [metrics[0]["compile_seconds"] for metrics in contender.rounds if "compile_seconds" in metrics[0]]
        if compiled:
            row["compile_seconds"] = compiled
    return row


def fastest_pytorch(rows):
    """The measured row of PyTorch with the least best_seconds, or None."""
    measured = [row for row in rows if row["kind"] == "pytorch" and "best_seconds" in row]
    return min(measured, key=lambda row: row["best_seconds"], default=None)


def comparison(rows):
    """Adds each row's speed relative to the best PyTorch, and says whether the contenders did the same work."""
    measured = {row["key"]: row for row in rows if "best_seconds" in row}
    best_pytorch = fastest_pytorch(rows)
    for row in measured.values():
        row["speed"] = best_pytorch["best_seconds"] / row["best_seconds"] if best_pytorch else None

    def spread(epoch):
        losses = [metrics[epoch]["train_loss"] for row in measured.values() if row["kind"] != "sgemm"
                  for metrics in row["rounds"]]
        if not all(map(math.isfinite, losses)):
            return math.inf
        return (max(losses) - min(losses)) / max(map(abs, losses)) if losses else None

    first, last = spread(0), spread(-1)
    return {
        "complete": len(measured) == len(rows),
        "ratios": [ratio for entry in ratios if (ratio := measured_ratio(measured, *entry))],
        "first_epoch_loss_spread": first,
        "last_epoch_loss_spread": last,
        "losses_agree": first is None or (first <= first_epoch_tolerance and last <= last_epoch_tolerance),
    }


def measured_ratio(measured, name, one, others, goal):
    """How many times as fast `one` is as the best of the others; None if the run has not both."""
    present = [measured[other] for other in others if other in measured]
    if one not in measured or not present:
        return None
    best = min(present, key=lambda row: row["best_seconds"])
    return {
        "name": name,
        "against": best["name"],
        "not_measured": [other for other in others if other not in measured],
        "times_as_fast": best["best_seconds"] / measured[one]["best_seconds"],
        "goal": goal,
    }


def accuracies_agree(accuracy):
    """Whether all that were trained for longer ended equally good; None if that was not asked for."""
    if not accuracy:
        return None
    if any(run["unavailable"] for run in accuracy["runs"]):
        return False
    means = [statistics.mean(epoch["test_accuracy"] for epoch in run["metrics"][-3:]) for run in accuracy["runs"]]
    return max(means) - min(means) <= accuracy_tolerance


# Markdown


def markdown(result):
    settings, machine, versions, compared = (result[key] for key in ("settings", "machine", "versions", "comparison"))
    epochs = settings["warm_up_epochs"] + settings["epochs"]
    timed = f"{settings['epochs']} timed epoch" + ("s" if settings["epochs"] > 1 else "")
    place = "a GPU" if settings["gpu"] else "the CPU"
    lines = [
        f"# Seconds per epoch on {place}: lockstep and its peers",
        "",
        f"LeNet on Fashion-MNIST, {settings['samples']} samples per epoch, batch {settings['batch_size']}, SGD with lr "
        f"{settings['lr']}, float32. Turns of each, in alternation: {settings['rounds']}; {timed} per "
        f"turn after {settings['warm_up_epochs']} that warms up.",
        "",
        "| | best s/epoch | median s/epoch | samples/s | speed (best PyTorch = 1) | train loss, epoch 1 "
        f"| train loss, epoch {epochs} | test accuracy, epoch {epochs} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *map(table_row, result["contenders"]),
        "",
        *ratio_table(compared["ratios"]),
        *accuracy_table(result.get("accuracy")),
        loss_line(compared, epochs),
        "",
        *(f"- {row['name']}: compiling took {spoken(row['compile_seconds'])}, outside of the epochs."
          for row in result["contenders"] if "compile_seconds" in row),
        *waiting_lines(result["contenders"]),
        *(["- The limit counts all of the network's arithmetic. lockstep does not compute the pixels that pooling drops, a "
           "fifth of the second convolution."] if any(row["kind"] == "sgemm" for row in result["contenders"]) else []),
        *([f"- Left out on request: {'; '.join(result['left_out'])}."] if result["left_out"] else []),
        f"- Date: {result['date']}",
        f"- Machine: {machine['cpu']}, {machine['cpus']} CPUs for this process; "
        + (f"GPU: {versions.get('gpu') or 'none found'}; " if settings["gpu"] else "")
        + f"{machine['system']}, Linux {machine['kernel']}; load {machine['load_before']:.2f} before the start"
        + (" (not quiet)" if machine["load_before"] > 0.5 else ""),
        f"- lockstep: {result['commit'] or 'unknown commit'}",
        f"- PyTorch: {versions['pytorch']}, Python {versions['python']}. {kernels(versions['same_libtorch_cpu'])}"
        if "pytorch" in versions else "- PyTorch: not available, or not asked for",
        f"- Command: `{result['command']}`",
    ]
    if machine["environment"]:
        variables = ", ".join(f"`{name}={value}`" for name, value in machine["environment"].items())
        lines.append(f"- Environment: {variables}")
    return "\n".join(lines) + "\n"


def table_row(row):
    if "best_seconds" not in row:
        return f"| {row['name']} | not measured: {row['unavailable'].replace('|', '/')} | | | | | | |"
    speed = f"{row['speed']:.2f}" if row["speed"] else ""
    learnt = " | | |"
    if row["kind"] != "sgemm":
        first, last = row["rounds"][0][0], row["rounds"][0][-1]
        learnt = f" {first['train_loss']:.6f} | {last['train_loss']:.4f} | {last['test_accuracy']:.4f} |"
    return (f"| {row['name']} | {row['best_seconds']:.2f} | {row['median_seconds']:.2f} "
            f"| {row['samples_per_second']:.0f} | {speed} |{learnt}")


def ratio_table(ratios):
    if not ratios:
        return []
    lines = ["| best against best | times as fast | goal | |", "|---|---:|---:|---|"]
    for ratio in ratios:
        verdict = ""
        if ratio["goal"]:
            verdict = "reached" if ratio["times_as_fast"] >= ratio["goal"] else "missed"
            if ratio["not_measured"] and verdict == "reached":
                verdict = f"open: not measured: {', '.join(ratio['not_measured'])}"
        name = ratio["name"]
        if name.endswith("both cores"):
            name += f" ({ratio['against']} is the best)"
        lines.append(f"| {name} | {ratio['times_as_fast']:.2f} | {ratio['goal'] or ''} | {verdict} |")
    return [*lines, ""]


def accuracy_table(accuracy):
    if not accuracy:
        return []
    epochs = accuracy["epochs"]
    lines = [f"Trained once more, for {epochs} epochs:", "",
             f"| | test accuracy, epoch {epochs} | its range in the last three epochs | train loss, epoch {epochs} |",
             "|---|---:|---:|---:|"]
    for run in accuracy["runs"]:
        if run["unavailable"]:
            lines.append(f"| {run['name']} | not measured: {run['unavailable'].replace('|', '/')} | | |")
            continue
        tested = [epoch["test_accuracy"] for epoch in run["metrics"]]
        lines.append(f"| {run['name']} | {tested[-1]:.4f} | {min(tested[-3:]):.4f} to {max(tested[-3:]):.4f} "
                     f"| {run['metrics'][-1]['train_loss']:.4f} |")
    verdict = "Equally good" if accuracies_agree(accuracy) else "**Not equally good, or not all measured**"
    return [*lines, "", f"{verdict}: the means of the last three epochs may differ by {accuracy_tolerance}.", ""]


def waiting_lines(rows):
    for row in rows:
        waits = [epoch["data_wait"] for metrics in row["rounds"] for epoch in metrics if "data_wait" in epoch]
        if waits:
            yield f"- {row['name']}: the ranks waited for data in at most {max(waits):.2%} of an epoch's time."


def loss_line(compared, epochs):
    if compared["first_epoch_loss_spread"] is None:
        return "No training was measured."
    verdict = "All that were measured learnt the same"
    if not compared["losses_agree"]:
        verdict = "**They did not learn the same, so the figures compare different work**"
    return (f"{verdict}: train losses differ by {compared['first_epoch_loss_spread']:.1e} in epoch 1 (at most "
            f"{first_epoch_tolerance:.0e}: rounding) and by {compared['last_epoch_loss_spread']:.1%} in epoch {epochs} "
            f"(at most {last_epoch_tolerance:.0%}).")


def spoken(compile_seconds):
    first, *later = compile_seconds
    return f"{first:.1f} s" + (f" ({min(later):.1f} s in later turns, from its cache)" if later else "")


def kernels(same):
    if same is None:
        return "Whether both run the same libtorch_cpu could not be told."
    if not same:
        return "**The two run different builds of libtorch_cpu.**"
    return "Both run the same libtorch_cpu, byte for byte."
