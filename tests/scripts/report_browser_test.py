#!/usr/bin/env python3
"""Opens reports in headless Chromium: the page's script runs without an error, and shows the runs' numbers.

report_browser_test.py LOCKSTEP [FOLDER]: skips itself (77) where Chromium is not installed. With FOLDER, screenshots
stay there.
"""
import html
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from browser import opened

lockstep = Path(sys.argv[1]).resolve()
work = Path(tempfile.mkdtemp())
shots = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None

# A person's deeds: the keyboard shows an epoch's values, "log" changes the axis, a box takes a run out.
DEEDS = """
const picture = document.querySelector("svg[tabindex]");
picture.dispatchEvent(new KeyboardEvent("keydown", {key: "End"}));
document.body.dataset.tip = document.getElementById("tip").textContent;
const heat = document.querySelector("canvas");
if (heat) heat.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowDown"}));
document.body.dataset.heat = document.getElementById("tip").textContent;
const before = picture.textContent;
picture.closest(".card").querySelector("button").click();
document.body.dataset.log = picture.textContent === before ? "same" : "changed";
const box = document.querySelector("table input");
if (box) box.click();
document.body.dataset.lines = picture.querySelectorAll("path").length;
"""


def looked_at(page, name, wanted, lines):
    if shots:
        for width, dark in ((400, False), (400, True), (1400, False), (1400, True)):
            picture = shots / f"{name}-{width}-{'dark' if dark else 'light'}.png"
            opened(page.as_uri(), width, dark, f"--screenshot={picture}")
    tried = page.with_name("tried-" + page.name)
    text = page.read_text()
    own = re.sub(r'<script id="data".*?</script>', "", text, flags=re.S)
    assert not re.search(r"(?:src|href)=|url\(|@import|fetch\(|https?://(?!www\.w3\.org/)", own), "the page names a file"
    tried.write_text(text.replace("</body>", f"<script>{{{DEEDS}}}</script></body>"))
    dom = opened(tried.as_uri(), 1400, False, "--dump-dom")
    shown = html.unescape(re.sub(r"<script.*?</script>|<style.*?</style>", "", dom, flags=re.S))
    for text in wanted:
        assert text in shown, f"{name}: the page does not show {text!r}"
    for text in ("[object", "undefined", "NaN", "Infinity"):
        assert text not in shown, f"{name}: the page shows {text!r}"
    deeds = dict(re.findall(r'data-(tip|heat|log|lines)="([^"]*)"', dom))
    assert deeds.get("log") == "changed" and "epoch" in deeds.get("tip", ""), deeds
    assert deeds["lines"] == str(lines), deeds
    assert "waited" in deeds["heat"] or "<canvas" not in dom, deeds


def kept_run(folder, epochs, ranks, evil=""):
    """Writes a run as lockstep train keeps it, with more epochs and ranks than a test can train."""
    mesh = {"data": ranks // 4, "pipeline": 2, "tensor": 2}
    layers = [f"layer{i}.conv" for i in range(20)]
    drawn = random.Random(1)
    times = [["forward", 0.0, 0.01], ["backward", 0.011, 0.02], ["bucket 0 allreduce", 0.02, 0.015], ["update", 0.04, 0.001]]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model": "resnet18" + evil, "lr": 0.3, "way": {"zero_stage": 0}}))
    (folder / "notes.json").write_text(json.dumps({
        "title": "resnet18" + evil, "ranks": [f"rank {rank} (cuda:{rank % 8})" for rank in range(ranks)],
        "split": {"mesh": mesh, "schedule": "1f1b", "microbatches": 8}, "samples": [64] * (ranks // 4),
        "tensors": ["".join(f"{name}.weight 32 64 3 3\n" for name in layers[10 * (rank // 2 % 2):][:10])
                    for rank in range(ranks)],
        "timeline": {"seconds": 0.042, "ranks": {str(rank): times for rank in range(ranks)}},
        "warnings": ["mind this" + evil], "straggler": "", "end": "", "best": {"by": "mae", "more_is_better": False}}))
    with open(folder / "metrics.jsonl", "w") as file:
        for epoch in range(1, epochs + 1):
            loss = None if epoch == 3 else 2 * math.exp(-epoch / 100) + 0.1  # a value that is not finite leaves a gap
            waits = {"data_wait": [0.01] * ranks, "rank_wait": [round(drawn.random(), 3) for _ in range(ranks)],
                     "memory": [2_000_000_000 + rank for rank in range(ranks)]}
            file.write(json.dumps({"epoch": epoch, "train_loss": loss, "train_accuracy": 0.5, "test_accuracy": 0.625,
                                   "seconds": 2.5, "data_wait": 0.004, "lr": 0.3 / epoch, "bytes_per_step": 1e6,
                                   "weights": "0123456789abcdef", "test": {"loss": 0.75, "mae": 0.25 + 1 / epoch},
                                   "ranks": waits}) + "\n")


def program(*arguments):
    subprocess.run([lockstep, *arguments], cwd=work, check=True, stdout=subprocess.DEVNULL)


try:
    evil = "</script><script>console.error('alert')</script><img src=x onerror=console.error(1)>{{data}}"
    flags = ["--data", "synthetic", "--model", "mlp", "--width", "0.0625", "--batch-size", "1000", "--epochs", "2",
             "--devices", "2xcpu", "--trace", "trace.json"]
    program("train", "--name", "a", *flags)
    program("train", "--name", "b", "--lr", "0.05", *flags)
    last = json.loads((work / "runs/a/metrics.jsonl").read_text().splitlines()[-1])
    own = [last["weights"], f"{last['test_accuracy']:.4g}", "Where the time goes", "Which rank has what", "A step",
           "rank 1 (cpu)", "computing", "fc1.weight 32x784", "500 of 1000 samples", "The step took", "batch_size"]
    judged = json.loads((work / "runs/a/notes.json").read_text())["best"]
    assert judged == {"by": "accuracy", "more_is_better": True}, judged
    looked_at(work / "runs/a/report.html", "one", own, lines=2)
    program("report", "runs/a", "runs/b")
    looked_at(work / "report.html", "two", [last["weights"], "0.05", "●", "2 runs"], lines=2)

    kept_run(work / "large/large", 1000, 64)
    program("report", "large", "--output", "large.html")
    large = ["0.625", "0123456789abcdef", "Test mae", "0.251 (epoch 1000)", "rank 63 (cuda:7)", "32x64x3x3", "mind this", "2 GB", "16 x 2 x 2"]
    looked_at(work / "large.html", "large", large, lines=2)
    kept_run(work / "evil" / ("<" + evil.replace("/", "|")), 4, 4, evil)
    program("report", "evil", "--output", "evil.html")
    looked_at(work / "evil.html", "evil", ["mind this" + evil, evil.replace("/", "|")], lines=2)
    program("sweep", "--name", "grid", "--data", "synthetic", "--model", "mlp", "--width", "0.0625", "--batch-size", "1000",
            "--epochs", "1", "--devices", "cpu", "--lr", "0.05", "0.1")
    page = (work / "runs/grid/report.html")
    shown = opened(page.as_uri(), 1400, False, "--dump-dom")
    for text in ("Sweep grid", "Test accuracy after the last epoch", "learning rate", "cpu_batch1000_lr0.05"):
        assert text in shown, text
    print("1 passed, 0 failed")
finally:
    shutil.rmtree(work, ignore_errors=True)
