#!/usr/bin/env python3
"""benchmarks/peers and race: what they conclude from figures, and that a contender that is missing is named.

    peers_test.py
"""

import sys

sys.dont_write_bytecode = True

import argparse
import importlib.machinery
import importlib.util
import pathlib
import subprocess
import tempfile
import unittest

peers = pathlib.Path(__file__).resolve().parents[2] / "benchmarks/peers"
sys.path.insert(0, str(peers))

import contenders
import report
import task


def program(name):
    """A program of benchmarks/peers, or beside it, as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(peers / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = module  # where its dataclasses are looked up
    loader.exec_module(module)
    return module


models, race = program("models"), program("../race")


def row(key, seconds, first_loss=2.3, last_loss=1.6, unavailable=None):
    """A contender's figures after one turn of two epochs, the second of which is timed."""
    _, name, kind, _ = next(entry for entry in contenders.on_cpu if entry[0] == key)
    contender = contenders.Contender(key, name, kind, ["/bin/true"], {}, unavailable)
    if not unavailable:
        contender.rounds = [[{"train_loss": first_loss, "seconds": 0.5}, {"train_loss": last_loss, "seconds": seconds}]]
    return report.figures(contender, {"warm_up_epochs": 1, "samples": 60000})


def ratio(rows, name):
    found = [entry for entry in report.comparison(rows)["ratios"] if entry["name"] == name]
    return found[0] if found else None


class Report(unittest.TestCase):
    both_cores = "lockstep, 2 ranks, against PyTorch on both cores"

    def test_warm_up_is_not_timed(self):
        self.assertEqual(row("lockstep-2", 5.0)["best_seconds"], 5.0)

    def test_against_the_better_of_two(self):
        rows = [row("lockstep-2", 5.0), row("pytorch-2", 12.0), row("ddp", 10.0)]
        found = ratio(rows, self.both_cores)
        self.assertEqual((found["times_as_fast"], found["against"]), (2.0, "PyTorch DDP over Gloo, 2 processes"))
        self.assertIn("reached", "\n".join(report.ratio_table([found])))

    def test_a_goal_is_open_while_a_peer_is_missing(self):
        rows = [row("lockstep-2", 5.0), row("pytorch-2", 10.0), row("ddp", None, unavailable="no Gloo")]
        found = ratio(rows, self.both_cores)
        self.assertEqual(found["not_measured"], ["ddp"])
        text = "\n".join(report.ratio_table([found]))
        self.assertIn("open", text)
        self.assertNotIn("reached", text)
        self.assertFalse(report.comparison(rows)["complete"])

    def test_a_missed_goal(self):
        rows = [row("lockstep-1", 9.0), row("lockstep-2", 6.0)]
        self.assertIn("missed", "\n".join(report.ratio_table(report.comparison(rows)["ratios"])))

    def test_different_work_is_seen(self):
        same = [row("lockstep-2", 5.0, first_loss=2.3), row("ddp", 5.0, first_loss=2.3 + 1e-6)]
        self.assertTrue(report.comparison(same)["losses_agree"])
        other = [row("lockstep-2", 5.0, first_loss=2.3), row("ddp", 5.0, first_loss=2.3 + 1e-5)]
        self.assertFalse(report.comparison(other)["losses_agree"])
        nan = [row("lockstep-2", 5.0), row("ddp", 5.0, last_loss=float("nan"))]
        self.assertFalse(report.comparison(nan)["losses_agree"])


    def test_accuracies(self):
        def run(*accuracies, unavailable=None):
            return {"unavailable": unavailable, "metrics": [{"test_accuracy": value} for value in accuracies]}

        self.assertIsNone(report.accuracies_agree(None))
        self.assertTrue(report.accuracies_agree({"runs": [run(0.1, 0.84, 0.80, 0.84), run(0.9, 0.82, 0.83, 0.84)]}))
        self.assertFalse(report.accuracies_agree({"runs": [run(0.84, 0.84, 0.84), run(0.80, 0.80, 0.80)]}))
        self.assertFalse(report.accuracies_agree({"runs": [run(0.84), run(unavailable="no PyTorch")]}))


class Models(unittest.TestCase):
    def agree(self, *losses):
        """Of contenders whose batches have so many parts."""
        chosen = []
        for parts, loss in losses:
            contender = contenders.Contender("mlp", "name", "pytorch", ["/bin/true"], {})
            contender.rounds = [[{"train_loss": loss, "seconds": 1}]]
            chosen.append((parts, contender))
        return models.losses_agree(chosen, models.loss_tolerance)

    def test_different_work_is_seen(self):
        self.assertTrue(self.agree((1, 2.0), (1, 2.0001)))
        self.assertFalse(self.agree((1, 2.0), (1, 2.001)))
        self.assertTrue(self.agree((1, 2.0), (2, 2.1), (2, 2.1)))  # BatchNorm sees other samples
        self.assertFalse(self.agree((1, 2.0), (1, float("nan"))))

    def test_data_are_as_large_as_an_epoch(self):
        with tempfile.TemporaryDirectory() as folder:
            for model in (models.models["gpt"], models.on_gpu["gpt-large-bf16"]):
                models.write_data(model, "gpt", None, pathlib.Path(folder, model.title), 3)
                size = pathlib.Path(folder, model.title, "text.txt").stat().st_size
                self.assertEqual((size - size // 10 - 1) // model.context, 3 * model.batch_size)

    def test_random_images_stand_in(self):
        with tempfile.TemporaryDirectory() as folder:
            data = pathlib.Path(folder, "data")
            task.write_random_samples(data, 5, 3)
            self.assertEqual(task.read_idx(data, "train-images-idx3-ubyte")[2], (5, 28, 28))
            self.assertEqual(task.read_idx(data, "t10k-labels-idx1-ubyte")[2], (3,))


class Race(unittest.TestCase):
    def seconds(self, limit=race.never, accuracies=(), then=""):
        """Of a program that prints an evaluation with each accuracy, to 0.85."""
        script = f"import json, time; [print(json.dumps(dict(test_accuracy=a)), flush=True) for a in {accuracies}]; {then}"
        contender = contenders.Contender("ddp", "name", "pytorch", [sys.executable, "-c", script], {})
        return race.seconds_to(contender, "--lr 1", 1, 0.85, limit)

    def test_the_clock_stops_at_the_accuracy(self):
        self.assertLess(self.seconds(accuracies=(0.1, 0.85), then="time.sleep(1000)"), race.never)

    def test_never(self):
        self.assertEqual(self.seconds(accuracies=(0.1, 0.84)), race.never)
        self.assertEqual(self.seconds(limit=0.1, then="time.sleep(1000)"), race.never)

    def test_a_failure_is_told(self):
        with self.assertRaisesRegex(contenders.Unavailable, "no memory"):
            self.seconds(accuracies=(0.1,), then="raise SystemExit('no memory')")

    def test_the_fastest_recipe_of_seed_0_counts(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "results")
            file.write_text("".join(f'["ddp", "{recipe}", {seed}, {accuracy}, {seconds}]\n' for recipe, seed, accuracy, seconds in (
                ("a", 0, 0.85, 9), ("b", 0, 0.85, 8), ("c", 0, 0.85, "Infinity"), ("a", 0, 0.9, 1), ("a", 1, 0.85, 1),
                ("b", 2, 0.85, 7), ("b", 1, 0.85, 20))))
            measured = race.Race(argparse.Namespace(to=0.85, results=file))
        self.assertEqual(measured.results(contenders.Contender("ddp", "name", "pytorch", [], {})), ("b", [20, 7]))


class Choice(unittest.TestCase):
    def keys(self, only=(), skip=()):
        return [entry[0] for entry in contenders.choose(contenders.on_cpu, list(only), list(skip))[0]]

    def test_patterns(self):
        self.assertEqual(self.keys(only=["lockstep-?", "ddp"]), ["lockstep-1", "lockstep-2", "ddp"])
        self.assertEqual(self.keys(only=["lockstep-*"], skip=["*-1"]), ["lockstep-2", "lockstep-grain", "lockstep-processes"])
        self.assertEqual(len(self.keys()), len(contenders.on_cpu))
        with self.assertRaises(ValueError):
            self.keys(skip=["ddpp"])

    def test_those_left_out_are_told(self):
        left_out = contenders.choose(contenders.on_cpu, [], ["mxnet-*"])[1]
        self.assertEqual(len(left_out), 3)


class Run(unittest.TestCase):
    def test_a_missing_program_keeps_its_row(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "train-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 9]) + bytes(9))
            command = [sys.executable, peers / "run", "--only", "lockstep-1", "--data-dir", folder,
                       "--lockstep", pathlib.Path(folder, "absent")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("| lockstep, 1 rank | not measured: no program at", done.stdout)
        self.assertIn("Left out on request: lockstep, 2 ranks", done.stdout)


if __name__ == "__main__":
    unittest.main()
