"""`StepWatch` counts steps and warns when they leave the prediction; the Trainer's callback is given to a real Trainer."""

import tempfile
import time
import unittest
import warnings

import torch
from test_planning import TINY
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from vescale_plan import PlanError, StepWatch, estimate, trainer_callback

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


if __name__ == "__main__":
    unittest.main()
