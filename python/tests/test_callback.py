"""`StepWatch` counts steps and warns when they leave the prediction; the Trainer's callback is given to a real Trainer."""

import tempfile
import time
import types
import unittest
import warnings
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from test_planning import TINY
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from vescale_plan import PlanError, StepWatch, estimate, generate_plan, trainer_callback

JOB = {"gpus": 1, "seq_len": 16, "global_batch": 8, "precision": "fp32"}


class Watching(unittest.TestCase):
    def test_slow_steps_are_told_once(self):
        plan = estimate(TINY, "zero=0,mbs=4", **JOB)
        watch = StepWatch(plan, warmup=1, window=3)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(8):
                time.sleep(3 * plan.predicted["step_time_s"])
                watch.step()
        self.assertEqual(len(watch.times), 6)
        self.assertEqual(len(said), 1)
        self.assertIn("the plan predicts", str(said[0].message))
        self.assertGreater(watch.measured()["step_time_ratio"], 1)

    def test_what_is_between_steps_is_left_out(self):
        watch = StepWatch(estimate(TINY, "zero=0,mbs=4", **JOB), warmup=0)
        self.assertEqual(watch.measured(), {})
        watch.step()
        watch.pause()
        watch.step()
        self.assertEqual(watch.times, [])

    def test_a_trainer_logs_the_prediction(self):
        def trained(accumulated):
            callback = trainer_callback(estimate(TINY, "zero=0,mbs=4", **JOB), warmup=1)
            rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(64)]
            with tempfile.TemporaryDirectory() as folder:
                args = TrainingArguments(
                    output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=accumulated, max_steps=6,
                    logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True,
                )
                config = LlamaConfig(**{key: value for key, value in TINY.items() if key != "model_type"})
                trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=rows, callbacks=[callback])
                trainer.train()
            return callback.watch, trainer.state.log_history

        watch, history = trained(2)
        self.assertEqual(len(watch.times), 5)
        self.assertIn("step_time_ratio", watch.measured())
        self.assertTrue(any("predicted_step_time_s" in entry for entry in history), history)
        with self.assertRaises(PlanError) as refused:
            trained(4)
        self.assertIn("the Trainer's step has 16 sequences", str(refused.exception))

    def test_ranks_that_share_sequences_count_once(self):
        alike = {"world_size": 8, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
        deepspeed = types.SimpleNamespace(config={"tensor_parallel": {"autotp_size": 2}})
        rows = [
            ("8 replicas", {}, None, 1, 16),
            ("context parallelism", {"cp_size": 2}, None, 1, 8),
            ("Ulysses", {"sp_size": 4}, None, 1, 4),
            ("tensor parallelism of accelerate", {"tp_size": 2, "cp_size": 2}, None, 1, 4),
            ("tensor parallelism of the model", {}, None, 4, 4),
            ("tensor parallelism of DeepSpeed", {}, deepspeed, None, 8),
        ]
        for what, sizes, deepspeed, tp, batch in rows:
            sizes = types.SimpleNamespace(**{"tp_size": 1, "cp_size": 1, "sp_size": 1, **sizes})
            args = types.SimpleNamespace(**alike, hf_deepspeed_config=deepspeed)
            model = types.SimpleNamespace(_tp_size=tp if tp != 1 else None)
            with self.subTest(what), mock.patch.dict(AcceleratorState._shared_state, {"parallelism_config": sizes}):
                for planned in (batch, batch * 2):
                    plan = estimate(TINY, "zero=0,mbs=1", **{**JOB, "global_batch": planned})
                    begin = trainer_callback(plan).on_train_begin
                    if planned == batch:
                        begin(args, None, None, model=model)
                        continue
                    with self.assertRaises(PlanError) as refused:
                        begin(args, None, None, model=model)
                    self.assertIn(f"the Trainer's step has {batch} sequences", str(refused.exception))

    def test_groups_of_replicas_are_refused(self):
        job = {"cluster": "8 x dgx-h100 + 8 x dgx-a100", "gpus": 16, "seq_len": 4096, "global_batch": 64}
        plan = generate_plan("llama3-8b", groups=2, **job)
        with self.assertRaises(PlanError) as refused:
            trainer_callback(plan)
        self.assertIn("plan.group(1)", str(refused.exception))
        trainer_callback(plan.group(1))


if __name__ == "__main__":
    unittest.main()
