"""Plans from Python: what is returned, what is refused, and that files round-trip."""

import copy
import itertools
import json
import os
import pathlib
import pickle
import sys
import tempfile
import unittest
from unittest import mock

import yaml

from vescale_plan import Plan, Strategy, diagnose, estimate, falling, generate_plan, load, search

TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SMALL = {"gpus": 4, "seq_len": 16, "global_batch": 8, "precision": "fp32"}
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


class Planning(unittest.TestCase):
    def test_a_plan_fills_the_devices(self):
        plan = generate_plan(TINY, **SMALL)
        strategy = Strategy.read(plan)
        self.assertEqual(strategy.world, 4)
        self.assertEqual(strategy.global_batch, 8)
        self.assertGreater(plan.predicted["step_time_s"], 0)

    def test_later_ranks_recompute_fewer_layers(self):
        # The rows of `later_ranks_recompute_fewer_layers` in plans/tests/schedules.rs.
        rows = [
            (6, {}, [8, 8, 8, 8], [6, 6, 4, 0]),
            (5, {}, [7, 9, 9, 7], [5, 7, 5, 0]),
            (3, {"schedule": "interleaved", "vpp": 2}, [4] * 8, [3, 3, 3, 2, 3, 3, 3, 2]),
        ]
        for of_first, pipeline, sizes, expected in rows:
            strategy = Strategy(pp=4, num_micro_batches=16, recompute=f"falling:{of_first}", **pipeline)
            counts = [falling.recomputed(strategy, sizes, stage) for stage in range(len(sizes))]
            self.assertEqual(counts, expected)

    def test_constraints_hold(self):
        plan = generate_plan(TINY, tp=2, max_pp=1, **SMALL)
        self.assertEqual((plan.strategy["tp"], plan.strategy["pp"]), (2, 1))
        replicas = generate_plan(TINY, forbid=("tp", "pp", "cp"), **SMALL).strategy
        self.assertEqual(replicas["dp_shard"] * replicas["dp_replicate"], 4)

    def test_an_estimate_says_what_the_search_said(self):
        plan = generate_plan(TINY, **SMALL)
        self.assertEqual(estimate(TINY, plan, **SMALL).predicted, plan.predicted)

    def test_files_round_trip(self):
        plan = generate_plan(TINY, **SMALL)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "plan.yaml")
            plan.save(path)
            self.assertEqual(Plan.from_file(path), plan)
            self.assertEqual(load(path), plan)
            self.assertEqual(Strategy.read(path), Strategy.read(plan))
            # The plan carries its model: nothing else is needed.
            self.assertEqual(os.listdir(folder), ["plan.yaml"])

    def test_a_plan_is_a_value(self):
        plan = generate_plan(TINY, **SMALL)
        for same in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), Plan.from_yaml(plan.to_yaml())):
            self.assertEqual(same, plan)
            self.assertEqual(hash(same), hash(plan))
        self.assertEqual(len({plan, copy.copy(plan)}), 1)
        self.assertNotEqual(plan, estimate(TINY, "tp=2,pp=2", **SMALL))
        self.assertLess(len(repr(plan)), 160)
        self.assertIn(plan.id, repr(plan))

    def test_alternatives_come_in_order(self):
        found = search(TINY, **SMALL)
        plans = list(itertools.islice(found, 4))
        self.assertEqual(plans[0], generate_plan(TINY, **SMALL))
        self.assertEqual((found.best, found[3]), (plans[0], plans[3]))
        self.assertEqual(len({plan.id for plan in plans}), len(plans))
        times = [plan.predicted["step_time_s"] for plan in plans]
        self.assertEqual(times, sorted(times))

    def test_an_index_does_not_depend_on_what_was_asked_before(self):
        job = {"gpus": 16, "runtime": "torchtitan"}
        in_turn = list(itertools.islice(search("llama3-8b", **job), 24))
        times = [plan.predicted["step_time_s"] for plan in in_turn]
        self.assertEqual(times, sorted(times))
        for index in (11, 5, 17):
            self.assertEqual(search("llama3-8b", **job)[index], in_turn[index], index)

    def test_numbers_and_paths_of_any_kind_are_taken(self):
        class Eight:
            def __index__(self):
                return 8

        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "ours.yaml")
            path.write_text("schema_version: 1\nname: ours\nextends: dgx-h100\nspeed: {value: 0.9, origin: assumed, source: x}\n")
            plan = generate_plan("llama3-8b", gpus=Eight(), cluster=path)
            self.assertEqual(plan.workload["gpus"], 8)
            self.assertEqual(plan.cluster, str(path))
            with mock.patch.dict(os.environ, {"WORLD_SIZE": "many"}), self.assertRaises(ValueError) as refused:
                generate_plan("llama3-8b")
            self.assertIn("WORLD_SIZE is 'many'", str(refused.exception))
            notes = pathlib.Path(folder, "notes.txt")
            notes.write_text("notes", encoding="utf-8")
            with self.assertRaises(OSError) as refused:
                plan.save(notes)
            self.assertIn("delete it first", str(refused.exception))

    def test_a_search_ends_with_its_space(self):
        found = search(TINY, forbid=("tp", "pp", "cp"), dp_shard=4, zero=3, mbs=2, recompute="none", **SMALL)
        every = list(found)
        self.assertEqual(every, list(found))
        self.assertEqual(len({plan.id for plan in every}), len(every))
        with self.assertRaises(IndexError):
            found[len(every)]

    def test_a_search_waits_until_it_is_asked(self):
        found = search("llama3-405b", gpus=8)
        with self.assertRaises(ValueError):
            found.best

    def test_answers_are_those_of_the_command_line(self):
        plan = estimate(TINY, "zero=3", **SMALL)
        other = estimate(TINY, "tp=2", **SMALL)
        explained = plan.explain(why_not="tp=2")
        self.assertIn("One decision away", str(explained))
        self.assertEqual(explained.data["plan_id"], plan.id)
        self.assertEqual(explained.data["why_not"]["strategy"]["tp"], 2)
        compared = plan.compare(other)
        self.assertIn("step time", str(compared))
        self.assertEqual(compared.data["second"]["step_time_s"], other.predicted["step_time_s"])
        self.assertIn(["tp", "1", "2"], compared.data["changed"])

    def test_a_report_is_written(self):
        plan = estimate(TINY, "zero=3", **SMALL)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "report.html")
            plan.report(path)
            page = path.read_text(encoding="utf-8")
            self.assertIn(plan.id, page)
            path.write_text("notes", encoding="utf-8")
            with self.assertRaises(OSError):
                plan.report(path)

    def test_a_log_is_diagnosed(self):
        plan = estimate(TINY, "zero=1", runtime="megatron-core", **SMALL)
        step = " iteration {}/ 20 | elapsed time per iteration (ms): {} | global batch size: 8 |\n"
        with tempfile.TemporaryDirectory() as folder:
            log = pathlib.Path(folder, "train.log")
            log.write_text("".join(step.format(i, 200.0 if i < 3 else 100.0) for i in range(1, 21)), encoding="utf-8")
            found = diagnose(log, plan)
            self.assertEqual(found.data["measured"]["step_time_s"], 0.1)
            self.assertIn("Where the gap may lie", str(found))
            log.write_text("nothing\n", encoding="utf-8")
            with self.assertRaises(ValueError) as refused:
                diagnose(log, plan)
            self.assertIn("no training step", str(refused.exception))

    def test_types_of_states_and_parts_to_recompute_are_decisions(self):
        job = {"gpus": 8, "runtime": "megatron-core"}
        decided = {"grad_dtype": "bf16", "optim_states": "bf16_moments", "recompute": "selective:mlp"}
        text = ",".join(f"{name}={value}" for name, value in decided.items())
        mine = estimate("llama3-8b", f"zero=1,{text}", **job)
        found = generate_plan("llama3-8b", zero=1, **decided, **job)
        for plan in (mine, found):
            self.assertEqual({name: plan.strategy[name] for name in decided}, decided)
            self.assertEqual(Plan.from_yaml(plan.to_yaml()), plan)
            self.assertIn("optim_states", str(plan.explain(why_not="zero=1,optim_states=split_master")))
        with self.assertRaises(ValueError) as refused:
            Strategy.read({"optim_states": "split_master"})
        self.assertIn("strategy.optim_states", str(refused.exception))

    def test_groups_of_replicas_lie_on_pools_that_differ(self):
        job = {"cluster": "8 x dgx-h100 + 8 x dgx-a100", "gpus": 16, "seq_len": 4096, "global_batch": 64}
        plan = generate_plan("llama3-8b", groups=2, **job)
        self.assertEqual(sum(group["global_batch"] for group in plan.groups), 64)
        self.assertEqual(Plan.from_yaml(plan.to_yaml()), plan)
        self.assertIn("groups=2", repr(plan))
        self.assertIn(" | ", plan._repr_html_())
        self.assertIn("group 2", str(plan.explain()))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "plan.yaml")
            plan.save(path)
            self.assertEqual(Plan.from_file(path + "#2"), plan.group(2))
            plan.report(os.path.join(folder, "report.html"))
        self.assertEqual(Strategy.read(plan.group(1)).global_batch, plan.groups[0]["global_batch"])
        self.assertTrue(plan.group(1).export("torchtitan"))
        alike = generate_plan("llama3-8b", groups=1, **job)
        self.assertEqual(alike.groups, [])
        self.assertIn(["groups", "2", "1"], plan.compare(alike).data["changed"])
        # What `parallelize` applies has replicas that are all alike.
        self.assertEqual(generate_plan("llama3-8b", **job).groups, [])
        for refused in (
            lambda: plan.group(3),
            lambda: alike.group(1),
            lambda: plan.export("torchtitan"),
            lambda: plan.explain(why_not="tp=2"),
            lambda: Strategy.read(plan),
            lambda: estimate("llama3-8b", plan, **job),
        ):
            with self.assertRaises(ValueError) as error:
                refused()
            self.assertIn("group", str(error.exception))

    def test_notebooks_show_plans_and_answers(self):
        plan = estimate(TINY, "zero=3", **SMALL)
        self.assertIn("<table>", plan._repr_html_())
        self.assertIn("One decision away", plan.explain()._repr_html_())

    def test_a_plan_is_exported(self):
        plan = estimate(TINY, "tp=2,zero=3", runtime="torchtitan", **{**SMALL, "precision": "bf16"})
        with self.assertRaises(ValueError) as refused:
            plan.export("torchtitan@0.2")
        self.assertIn("model", str(refused.exception))
        self.assertIn("vocab_size", "".join(plan.export("torchtitan").values()))
        files = estimate(TINY, "zero=1", runtime="megatron-core", **SMALL).export(
            "megatron-lm", launcher="torchrun", tokenizer="org/tokenizer", data="/data"
        )
        self.assertEqual(sorted(files), ["launch.sh", "megatron_args.sh"])
        self.assertIn("--num-layers 4", files["megatron_args.sh"])

    def test_example_plans_are_read(self):
        plans = sorted(EXAMPLES.glob("*.yaml"))
        self.assertTrue(plans)
        for path in plans:
            self.assertEqual(Strategy.read(path), Strategy.read(Plan.from_file(path)))

    def test_plan_files_that_no_command_reads_are_not_applied(self):
        plan = generate_plan(TINY, **SMALL)
        text = plan.to_yaml()
        rows = [
            ("no precision", "    precision: fp32\n".replace("    ", "  "), "", "precision"),
            ("an id of other decisions", f"id: {plan.id}", "id: 0123456789abcdef", "id"),
            ("a text for a switch", "sequence_parallel: false", 'sequence_parallel: maybe', "sequence_parallel"),
            ("another version", "schema_version: 1", "schema_version: 9", "schema_version"),
            ("no prediction", "prediction:", "predicted:", "predict"),
        ]
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "plan.yaml")
            for what, old, new, said in rows:
                self.assertIn(old, text, what)
                # The last `precision` is the strategy's.
                changed = new.join(text.rsplit(old, 1))
                pathlib.Path(path).write_text(changed, encoding="utf-8")
                readers = [lambda: Plan.from_file(path), lambda: Strategy.read(path)]
                if what != "an id of other decisions":
                    # Without the planner, which computes ids.
                    readers.append(lambda: Strategy.read(yaml.safe_load(changed)))
                for reader in readers:
                    with self.subTest(what), self.assertRaises(ValueError) as refused:
                        reader()
                    self.assertIn(said, str(refused.exception))

    def test_the_name_of_a_plan_file_does_not_say_what_it_holds(self):
        plan = generate_plan(TINY, **SMALL)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "plan.json")
            plan.save(path)
            self.assertEqual(Strategy.read(path), Strategy.read(plan))
            for text in (plan.to_yaml(), json.dumps(yaml.safe_load(plan.to_yaml()))):
                pathlib.Path(path).write_text(text, encoding="utf-8")
                self.assertEqual(Strategy.read(path), Strategy.read(plan))
                with mock.patch.dict(sys.modules, {"vescale_plan._native": None}):
                    self.assertEqual(Strategy.read(path), Strategy.read(plan))

    def test_bad_input_is_refused_in_one_line(self):
        cases = [
            (lambda: generate_plan("lama3-8b", gpus=8), "did you mean `llama3-8b`"),
            (lambda: generate_plan(TINY, cluster="dgx-h10", **SMALL), "did you mean `dgx-h100`"),
            (lambda: generate_plan(TINY, tpp=2, **SMALL), "did you mean `tp`"),
            (lambda: generate_plan({**TINY, "model_type": "lama"}, **SMALL), "lama"),
            (lambda: generate_plan("llama3-405b", gpus=8), "no plan fits"),
            (lambda: generate_plan(TINY, gpus=12, runtime="megatron-core"), "nearest numbers of GPUs"),
            (lambda: generate_plan(TINY, gpus=0), "gpus"),
            (lambda: search(TINY, packing="padded", **SMALL), "packing: packing is of documents"),
            (lambda: estimate(TINY, "tp=3", **SMALL), "multiply to the number of GPUs"),
            (lambda: Strategy.read({"tq": 1}), "did you mean tp"),
            (lambda: Strategy.read({"tp": 0}), "strategy.tp is 0"),
            (lambda: Strategy.read({"tp": "2"}), "strategy.tp is '2'; expected a whole number"),
            (lambda: Strategy.read({"zero": True}), "strategy.zero is True"),
            (lambda: Strategy.read({"zero": [1]}), "strategy.zero is [1]"),
            (lambda: Strategy.read({"stages": None}), "strategy.stages is None"),
            (lambda: Strategy.read({"axis_order": 5}), "strategy.axis_order is 5"),
            (lambda: Strategy.read({"reshard_after_forward": "no"}), "strategy.reshard_after_forward is 'no'"),
            (lambda: Strategy.read({"overlap": 3}), "strategy.overlap is 3"),
            (lambda: Strategy.read({"overlap": {"grads": True}}), "expected true or false for each of grad_reduce"),
            (lambda: Strategy.read({"offload_layers": True}), "strategy.offload_layers is True"),
            (lambda: Strategy.read({"recompute": 1}), "strategy.recompute is 1"),
            (lambda: Strategy.read("no-such-plan.yaml"), "no-such-plan.yaml"),
            (lambda: Plan.from_file("no-such-plan.yaml"), "no-such-plan.yaml"),
            (lambda: search("gpt2", gpus=8, seq_len=1025), "seq_len 1025"),
            (lambda: search(TINY, **{**SMALL, "seq_len": 10**30}), "seq_len 1000"),
            (lambda: search(TINY, **{**SMALL, "seq_len": True}), "seq_len True: expected a whole number"),
            (lambda: search(TINY, cluster=None, **SMALL), "cluster None: expected a text"),
            (lambda: search(TINY, lengths={512: 1}, **SMALL), "lengths {512: 1}: expected a text"),
            (lambda: search(TINY, headroom="5%", **SMALL), "headroom '5%': expected a number"),
            (lambda: search(TINY, objective=None, **SMALL), "objective None: expected time or memory"),
            (lambda: search(TINY, cluster="dgx-a100", **{**SMALL, "precision": "fp8"}), "precision fp8"),
            (lambda: estimate(TINY, "zero=3", **SMALL).group(-1), "it has no groups"),
            (lambda: diagnose("train.log", estimate(TINY, "zero=3", **SMALL), warmup=-1), "warmup -1"),
        ]
        for attempt, said in cases:
            with self.assertRaises(ValueError, msg=said) as refused:
                attempt()
            self.assertIn(said, str(refused.exception))
            self.assertNotIn("\n", str(refused.exception))
            # The command line's flags mean nothing here.
            self.assertNotIn("--", str(refused.exception))


if __name__ == "__main__":
    unittest.main()
