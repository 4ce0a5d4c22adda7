"""What the runner measured, as figures and as Markdown."""

import math
import pathlib
import statistics

# All contenders start from the same weights and see the same minibatches. Until the loss leaves its plateau near ln 10,
# within the second epoch, their losses differ by rounding alone, some 1e-7. A learning rate of 0.19, another order of
# the samples or max pooling make 1e-5 and more. Leaving the plateau then multiplies rounding to some percent.
first_epoch_tolerance = 1e-6
last_epoch_tolerance = 0.05


def without_folders(text):
    """A command's word without the path that it has on this machine."""
    return pathlib.Path(text).name if text.startswith("/") else text


def figures(contender, settings):
    """One contender's results as plain values; without times if it has no figures, and then with the reason."""
    row = {
        "name": contender.name,
        "command": [without_folders(str(word)) for word in contender.command],
        "unavailable": contender.unavailable,
        "rounds": contender.rounds,
    }
    timed = [epoch["seconds"] for metrics in contender.rounds for epoch in metrics[settings["warm_up_epochs"]:]]
    if timed and not contender.unavailable:
        row["best_seconds"] = min(timed)
        row["median_seconds"] = statistics.median(timed)
        row["samples_per_second"] = settings["samples"] / min(timed)
    return row


def comparison(rows):
    """Adds each row's speed relative to the best PyTorch, and says whether the contenders did the same work."""
    measured = [row for row in rows if "best_seconds" in row]
    seconds = {row["name"]: row["best_seconds"] for row in measured}
    best_pytorch = min((best for name, best in seconds.items() if name.startswith("PyTorch")), default=None)
    for row in measured:
        row["speed"] = best_pytorch / row["best_seconds"] if best_pytorch else None

    def speed_up(one, two):
        return seconds[one] / seconds[two] if one in seconds and two in seconds else None

    def spread(epoch):
        losses = [metrics[epoch]["train_loss"] for row in measured for metrics in row["rounds"]]
        if not all(map(math.isfinite, losses)):
            return math.inf
        return (max(losses) - min(losses)) / max(map(abs, losses)) if losses else None

    first, last = spread(0), spread(-1)
    return {
        "complete": len(measured) == len(rows),
        "lockstep_2_ranks_over_1": speed_up("lockstep, 1 rank", "lockstep, 2 ranks"),
        "pytorch_2_threads_over_1": speed_up("PyTorch, 1 thread", "PyTorch, 2 threads"),
        "first_epoch_loss_spread": first,
        "last_epoch_loss_spread": last,
        "losses_agree": bool(measured) and first <= first_epoch_tolerance and last <= last_epoch_tolerance,
    }


def markdown(result):
    settings, machine, versions, compared = (result[key] for key in ("settings", "machine", "versions", "comparison"))
    epochs = settings["warm_up_epochs"] + settings["epochs"]
    timed = f"{settings['epochs']} timed epoch" + ("s" if settings["epochs"] > 1 else "")
    lines = [
        "# Seconds per epoch on the CPU: lockstep and PyTorch",
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
        *speed_up_lines(compared),
        loss_line(compared, epochs),
        "",
        f"- Date: {result['date']}",
        f"- Machine: {machine['cpu']}, {machine['cpus']} CPUs for this process; {machine['system']}, Linux "
        f"{machine['kernel']}; load {machine['load_before']:.2f} before the start"
        + (" (not quiet)" if machine["load_before"] > 0.5 else ""),
        f"- lockstep: {result['commit'] or 'unknown commit'}",
        f"- PyTorch: {versions['pytorch']}, Python {versions['python']}. {kernels(versions['same_libtorch_cpu'])}"
        if "pytorch" in versions else "- PyTorch: not available",
        f"- Command: `{result['command']}`",
    ]
    if machine["environment"]:
        variables = ", ".join(f"`{name}={value}`" for name, value in machine["environment"].items())
        lines.append(f"- Environment: {variables}")
    return "\n".join(lines) + "\n"


def table_row(row):
    if "best_seconds" not in row:
        return f"| {row['name']} | not measured: {row['unavailable'].replace('|', '/')} | | | | | | |"
    first, last = row["rounds"][0][0], row["rounds"][0][-1]
    speed = f"{row['speed']:.2f}" if row["speed"] else ""
    return (f"| {row['name']} | {row['best_seconds']:.2f} | {row['median_seconds']:.2f} "
            f"| {row['samples_per_second']:.0f} | {speed} "
            f"| {first['train_loss']:.6f} | {last['train_loss']:.4f} | {last['test_accuracy']:.4f} |")


def speed_up_lines(compared):
    lines = []
    if compared["lockstep_2_ranks_over_1"]:
        lines.append(f"lockstep: two ranks are {compared['lockstep_2_ranks_over_1']:.2f} times as fast as one.")
    if compared["pytorch_2_threads_over_1"]:
        lines.append(f"PyTorch: two threads are {compared['pytorch_2_threads_over_1']:.2f} times as fast as one.")
    return lines


def loss_line(compared, epochs):
    if compared["first_epoch_loss_spread"] is None:
        return "Nothing was measured."
    verdict = "All that were measured learnt the same"
    if not compared["losses_agree"]:
        verdict = "**They did not learn the same, so the figures compare different work**"
    return (f"{verdict}: train losses differ by {compared['first_epoch_loss_spread']:.1e} in epoch 1 (at most "
            f"{first_epoch_tolerance:.0e}: rounding) and by {compared['last_epoch_loss_spread']:.1%} in epoch {epochs} "
            f"(at most {last_epoch_tolerance:.0%}).")


def kernels(same):
    if same is None:
        return "Whether both run the same libtorch_cpu could not be told."
    if not same:
        return "**The two run different builds of libtorch_cpu.**"
    return "Both run the same libtorch_cpu, byte for byte."
