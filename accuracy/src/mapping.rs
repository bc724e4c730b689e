//! Maps a published run to a scenario and a strategy, by rules that know no run, model or source.

use catalog::runs::{Recipe, Run};
use catalog::runtime::{Rewrite, SequenceParallelUse};
use catalog::{
    Adapters, Lengths, Overlap, Packing, Precision, Runtime, ScheduleKind, Workload, WorkloadSizes,
    Zero,
};
use costmodel::Scenario;
use plans::{Decisions, Recompute, StagePartition, Strategy};

use super::framework::{self, sharding};
use super::machine;

/// A run that is ready to be predicted.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) scenario: Scenario,
    pub(crate) strategy: Strategy,
    /// Whether the run or its source names its framework.
    pub(crate) names_framework: bool,
    /// Whether the run's description of its GPU fits only one variant of it.
    pub(crate) names_device: bool,
}

/// Maps a run, or returns what is missing.
pub(crate) fn map(run: &Run) -> Result<Mapped, String> {
    out_of_scope(run)?;
    let (runtime, names_framework) = framework::runtime(run)?;
    let (cluster, names_device) = machine::cluster(run)?;
    let precision = precision(run)?;
    let sizes = Sizes::of(run)?;
    // GPT-3's recipes of the Megatron family train with dropout 0.1 (NeMo `megatron_gpt_config.yaml`), and so does GPT-2 of
    // Hugging Face's library (transformers 5.23, `GPT2Config.resid_pdrop`, `embd_pdrop`, `attn_pdrop`).
    let dropout = ["megatron", "nemo", "hf-"]
        .iter()
        .any(|family| runtime.name.starts_with(family));
    let model = super::model::build(run, sizes.tp, sizes.seq_len, dropout)?;
    let model = model
        .with_adapters(adapters(run)?)
        .map_err(|e| e.to_string())?;
    let workload = Workload::new(WorkloadSizes {
        gpus: sizes.gpus,
        seq_len: sizes.seq_len,
        global_batch: sizes.global_batch,
        precision,
    })
    .map_err(|e| e.to_string())?;
    let workload = packed(run, workload)?;
    let workload = match Recipe::of(run).is_some_and(|recipe| recipe.alike_tokens) {
        true => workload.of_alike_tokens(),
        false => workload,
    };
    let decisions = decisions(run, &sizes, model.layers, &runtime)?;
    let strategy =
        Strategy::new(decisions, &model, &workload).map_err(|e| format!("strategy: {e}"))?;
    let scenario = Scenario {
        model,
        cluster,
        runtime,
        workload,
        headroom: 0.0,
    };
    Ok(Mapped {
        scenario,
        strategy,
        names_framework,
        names_device,
    })
}

/// The sizes of a run's mesh, sequences and batch.
struct Sizes {
    gpus: u64,
    tp: u64,
    pp: u64,
    vpp: u64,
    cp: u64,
    dp: u64,
    seq_len: u64,
    micro_batch: u64,
    global_batch: u64,
}

impl Sizes {
    fn of(run: &Run) -> Result<Self, String> {
        let need = |value: Option<u64>, field: &str| {
            run.size(field, value)
                .filter(|&v| v > 0)
                .ok_or_else(|| format!("{field} is not stated"))
        };
        let gpus = need(run.num_gpus, "num_gpus")?;
        let tp = need(run.tp, "tp")?;
        let pp = need(run.pp, "pp")?;
        let cp = run.size("cp", run.cp).unwrap_or(1);
        let seq_len = need(run.seq_len.or_else(|| longest(run)), "seq_len")?;
        let dp = gpus / tp.saturating_mul(pp).saturating_mul(cp).max(1);
        let micro_batch = micro_batch(run, dp)?;
        let global_batch = match run.size("global_batch", run.global_batch) {
            Some(batch) => batch,
            None => run
                .grad_accum
                .ok_or("global_batch is not stated")?
                .saturating_mul(micro_batch)
                .saturating_mul(dp),
        };
        Ok(Self {
            gpus,
            tp,
            pp,
            vpp: virtual_stages(run, pp),
            cp,
            dp,
            seq_len,
            micro_batch,
            global_batch,
        })
    }
}

/// Virtual stages of each pipeline rank: from the run's recipe if it sets them, else from the run.
fn virtual_stages(run: &Run, pp: u64) -> u64 {
    let layers = run.model.layers.filter(|_| pp > 1);
    let of_recipe = || {
        let of_all_ranks = pp.saturating_mul(Recipe::of(run)?.virtual_stage_layers?);
        layers?
            .checked_div(of_all_ranks)
            .filter(|&stages| stages > 0)
    };
    of_recipe()
        .or_else(|| run.size("vpp", run.vpp))
        .unwrap_or(1)
}

fn decisions(
    run: &Run,
    sizes: &Sizes,
    layers: u64,
    runtime: &Runtime,
) -> Result<Decisions, String> {
    let &Sizes {
        tp,
        pp,
        vpp,
        cp,
        dp,
        micro_batch,
        ..
    } = sizes;
    let zero = zero(run, dp * cp, runtime)?;
    let (dp_shard, dp_replicate) = shards_and_replicas(run, zero, dp);
    // Megatron-Core recomputes nothing by default (`recompute_granularity` is null, also in NeMo's
    // scripts/performance/recommended_model_configs).
    let habit = ["nemo", "megatron-core"]
        .contains(&runtime.name.as_str())
        .then_some("none");
    let etp = run.size("etp", run.etp);
    let etp = etp.unwrap_or_else(|| default_etp(run, tp));
    // Runs that do not say have what the runtime's users usually have.
    let usual = match runtime.space.sequence_parallel {
        SequenceParallelUse::Always | SequenceParallelUse::Usual => true,
        SequenceParallelUse::Never | SequenceParallelUse::Choice => false,
    };
    Ok(Decisions {
        tp,
        pp,
        vpp,
        cp,
        ep: run.size("ep", run.ep).unwrap_or(1),
        etp,
        dp_shard,
        dp_replicate,
        zero,
        // FSDP under a pipeline keeps parameters gathered (torchtitan's default policy).
        reshard_after_forward: zero == Zero::Z3
            && !sharding(run).contains("shard_grad_op")
            && pp == 1,
        sequence_parallel: tp > 1 && run.sequence_parallel.unwrap_or(usual),
        micro_batch,
        num_micro_batches: sizes.global_batch / (dp * micro_batch).max(1),
        recompute: recompute(run, layers / (pp * vpp).max(1), habit)?,
        schedule: ScheduleKind::one_f_one_b(vpp),
        cp_kind: runtime.space.usual_cp_kind(),
        axis_order: runtime.space.axis_orders[0],
        stages: stages(run, layers, pp * vpp)?,
        offload_layers: run.size_flag("cpu_offloading_num_layers").unwrap_or(0),
        ..Decisions::on_one_gpu(layers, overlap(run, runtime.overlap))
    })
}

/// Layers of each stage: those of the pipeline layout that the run states in Megatron-LM's letters; else even, but for the ends that
/// its recipe makes shorter.
fn stages(run: &Run, layers: u64, count: u64) -> Result<StagePartition, String> {
    if let Some(layout) = run.text_flag("pp_layout") {
        let stages = interop::import::parse_layout(layout).map(StagePartition);
        return stages.ok_or_else(|| {
            format!("pp_layout `{layout}`: expected a layout such as Et*9|t*10|t*11L")
        });
    }
    match Recipe::of(run).and_then(|recipe| recipe.fewer_layers) {
        Some([first, last]) if count > 1 => {
            let stages = StagePartition::lighter_ends(layers, count, first, last);
            stages.ok_or_else(|| {
                format!(
                    "{layers} layers do not divide into {count} stages of which the first has {first} and the last {last} fewer"
                )
            })
        }
        _ => Ok(StagePartition::even(layers, count)),
    }
}

/// Sizes of data parallelism: `(ranks that share states, replicas of such groups)`.
fn shards_and_replicas(run: &Run, zero: Zero, dp: u64) -> (u64, u64) {
    if zero == Zero::Z0 {
        return (1, dp);
    }
    let replicas = run.size_flag("hsdp_replicas");
    let group = zero_group(run).filter(|&group| dp.is_multiple_of(group));
    let replicas = replicas.or(group.map(|group| dp / group)).unwrap_or(1);
    (dp / replicas.max(1), replicas.max(1))
}

/// The overlap that the run states; where it states none, its runtime's default.
fn overlap(run: &Run, habit: Overlap) -> Overlap {
    let said = |names: &[&str], habit: bool| {
        let flag = names.iter().find_map(|name| run.flag(name));
        flag.and_then(serde_json::Value::as_bool).unwrap_or(habit)
    };
    Overlap {
        tensor_parallel: said(&["tp_comm_overlap", "async_tp"], habit.tensor_parallel),
        grad_reduce: said(
            &["overlap_grad", "overlap_grad_sync", "overlap_grad_reduce"],
            habit.grad_reduce,
        ),
        param_gather: said(
            &["overlap_param_sync", "overlap_param_gather"],
            habit.param_gather,
        ),
        pipeline: said(&["overlap_p2p"], habit.pipeline),
        expert_parallel: habit.expert_parallel,
    }
}

/// Expert tensor parallelism of a run that does not state it: Megatron splits experts like the other layers unless
/// expert parallelism takes those ranks.
fn default_etp(run: &Run, tp: u64) -> u64 {
    if run.model.experts.is_some_and(|e| e > 1) && sharding(run).contains("megatron") {
        tp
    } else {
        1
    }
}

/// Ranks that share states under ZeRO, if the run (`zero1_size`) or its recipe limits them.
fn zero_group(run: &Run) -> Option<u64> {
    let size = run.size_flag("zero1_size");
    let of_recipe = || Recipe::of(run)?.shard_group;
    size.or_else(of_recipe).filter(|&ranks| ranks > 0)
}

/// Longest sequence of a run with varying lengths, which decides its peak memory; else `None`.
fn longest(run: &Run) -> Option<u64> {
    run.size_flag("max_sample_len_tokens")
        .filter(|_| run.is_on("variable_length"))
}

/// The adapters that a LoRA run trains, from its source's recipe: the schema has no such fields.
fn adapters(run: &Run) -> Result<Option<Adapters>, String> {
    let says = |key: &str| run.text_flag(key).is_some_and(|said| said.contains("LoRA"));
    if !run.is_on("lora") && !says("method") && !says("task") {
        return Ok(None);
    }
    let adapters = Recipe::of(run).and_then(|recipe| recipe.adapters);
    adapters
        .map(Some)
        .ok_or_else(|| "the rank and layers of LoRA are not stated".to_owned())
}

/// The workload of a fine-tuning run with its recipe's packed documents; unchanged for others.
fn packed(run: &Run, workload: Workload) -> Result<Workload, String> {
    let task = run.text_flag("task");
    let tunes = task.is_some_and(|task| task.contains("SFT") || task.contains("LoRA"));
    if !tunes {
        return Ok(workload);
    }
    let lengths = Recipe::of(run).and_then(|recipe| recipe.documents.as_deref());
    let lengths: Lengths = lengths
        .ok_or("the lengths of the packed documents are not stated")?
        .parse()?;
    let packed = workload.of_documents(lengths, Packing::Within);
    packed.map_err(|e| e.to_string())
}

fn out_of_scope(run: &Run) -> Result<(), String> {
    for (flag, what) in [
        ("act_offload", "activation offload"),
        ("activation_cpu_offload", "activation offload"),
        ("memory_only", "computed, not measured"),
        ("analytic", "computed, not measured"),
        ("optim_in_bwd", "optimizer in backward"),
        ("adamw8bit", "8-bit optimizer"),
    ] {
        if run.is_on(flag) {
            return Err(format!("out of scope: {what}"));
        }
    }
    for key in ["method", "task"] {
        let value = run.text_flag(key).unwrap_or("");
        if value.contains("QLoRA") || value.contains("offload") {
            return Err(format!("out of scope: {value}"));
        }
    }
    if run.is_on("variable_length") && longest(run).is_none() {
        return Err("out of scope: sequences of varying length".to_owned());
    }
    Ok(())
}

fn precision(run: &Run) -> Result<Precision, String> {
    let label = run
        .text("precision", run.precision.as_deref())
        .ok_or("precision is not stated")?;
    let label = label.to_lowercase();
    if label.contains("fp8") || label.contains("mxfp8") {
        Ok(Precision::Fp8)
    } else if label.contains("fp4") {
        Err("out of scope: 4-bit products".to_owned())
    } else if label.contains("bf16") {
        Ok(Precision::Bf16)
    } else if label.contains("fp16") || label.contains("16-mixed") {
        Ok(Precision::Fp16)
    } else if label.contains("32") {
        Ok(Precision::Fp32)
    } else {
        Err(format!("precision `{label}` is not recognised"))
    }
}

fn micro_batch(run: &Run, dp: u64) -> Result<u64, String> {
    if let Some(batch) = run.size("micro_batch", run.micro_batch).filter(|&b| b > 0) {
        return Ok(batch);
    }
    match (run.global_batch, run.grad_accum) {
        (Some(global), Some(steps)) if dp * steps > 0 && global.is_multiple_of(dp * steps) => {
            Ok(global / (dp * steps))
        }
        _ => Err("micro_batch is not stated".to_owned()),
    }
}

fn zero(run: &Run, shared: u64, runtime: &Runtime) -> Result<Zero, String> {
    let label = sharding(run).to_lowercase();
    if shared == 1 {
        // One rank shards nothing. But an engine that visits modules does so on one rank too, and
        // PyTorch's `fully_shard` copies on one rank what it would gather on several.
        let has = |rewrite| runtime.rewrites.contains(&rewrite);
        let framework = run.text_flag("framework");
        let by_fsdp = || framework.is_some_and(|name| name.contains("FSDP"));
        let visits = has(Rewrite::VisitModules) && label.contains("zero3")
            || has(Rewrite::CopyShards) && by_fsdp();
        return Ok(if visits { Zero::Z3 } else { Zero::Z0 });
    }
    let runtime = runtime.name.as_str();
    // Megatron's recipes shard optimizer states unless told otherwise.
    if label.is_empty() && ["nemo", "megatron-core"].contains(&runtime) {
        return Ok(Zero::Z1);
    }
    if label.contains("zero3")
        || label.contains("full_shard")
        || label.contains("fsdp")
        || label.contains("hsdp")
    {
        Ok(Zero::Z3)
    } else if label.contains("zero2") {
        Ok(Zero::Z2)
    } else if ["zero1", "distopt", "distributed optimizer"]
        .iter()
        .any(|name| label.contains(name))
    {
        Ok(Zero::Z1)
    } else if label.contains("none") || label.contains("ddp") || label.contains("zero0") {
        Ok(Zero::Z0)
    } else {
        Err(match label.as_str() {
            "" => "zero is not stated".to_owned(),
            label => format!("zero `{label}` is not recognised"),
        })
    }
}

/// The number `k` in a label such as `every 2nd layer`.
fn every(label: &str) -> Option<u64> {
    let (_, rest) = label.split_once("every ")?;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok().filter(|&k| k > 0)
}

fn recompute(run: &Run, per_stage: u64, habit: Option<&str>) -> Result<Recompute, String> {
    let label = framework::recompute(run)
        .or(habit)
        .ok_or("recompute is not stated")?;
    let label = label.to_lowercase();
    if label == "none" {
        Ok(Recompute::None)
    } else if let Some(every) = every(&label) {
        Ok(Recompute::Layers(per_stage.checked_div(every).unwrap_or(0)))
    } else if let Some(layers) = label.strip_prefix("block:") {
        let digits: String = layers.chars().take_while(char::is_ascii_digit).collect();
        digits
            .parse()
            .map(Recompute::Layers)
            .map_err(|_| format!("recompute `{label}`"))
    } else if label.contains("(op)") || label.contains("save") || label.contains("custom") {
        Ok(Recompute::SelectiveOps)
    } else if label.contains("selective") {
        Ok(Recompute::Selective)
    } else if label.contains("full") {
        Ok(Recompute::Full)
    } else {
        Err(format!("recompute `{label}` is not recognised"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuned(layers: u64, vpp: Option<u64>) -> Run {
        let mut run = Run {
            source: "NVIDIA/NeMo@1".to_owned(),
            vpp,
            ..Run::default()
        };
        run.model.layers = Some(layers);
        run.flags
            .get_or_insert_default()
            .insert("task".to_owned(), "SFT packed".into());
        run
    }

    #[test]
    fn recipes_say_how_many_layers_a_virtual_stage_has() {
        for (layers, stated, pp, vpp) in [
            (40, None, 4, 10),
            (40, Some(2), 4, 10),
            // Nothing is interleaved without a pipeline, or with fewer layers than ranks.
            (40, None, 1, 1),
            (2, Some(3), 4, 3),
            (40, None, u64::MAX, 1),
        ] {
            assert_eq!(
                virtual_stages(&tuned(layers, stated), pp),
                vpp,
                "{layers} {pp}"
            );
        }
    }

    #[test]
    fn deepseek_v3_is_divided_and_predicts_tokens_as_its_recipe_says() {
        let runs = catalog::runs::embedded().expect("embedded runs are well-formed");
        for (id, divided, mtp_layers) in [
            ("mb_2602_deepseekv3_b200_mxfp8_n256_gbs4096", "15x4/1", 1),
            ("mb_2602_deepseekv3_gb200_mxfp8_n256_gbs4096", "15x4/1", 1),
            ("mb_260401_deepseekv3_b200_mxfp8_n256_gbs4096", "15x4/1", 1),
            ("mb_260601_deepseekv3_gb200_mxfp8_n256_gbs4096", "15x4/1", 1),
            (
                "mb_2511_deepseekv3-w-mtp_b200_fp8-mx_n256_gbs2048",
                "15x4/1",
                1,
            ),
            (
                "mb_2511_deepseekv3-w-o-mtp_gb200_bf16_n256_gbs4096",
                "15x4/1",
                0,
            ),
            ("dgxc_v250505_deepseek-v3_bf16_h100_n512", "7/6x8/6", 1),
            ("dgxc_v250505_deepseek-v3_bf16_h100_n1024", "3/14x4/2", 1),
            ("dgxc_v250505_deepseek-v3_bf16_gb200_n512", "15/2x16/14", 1),
        ] {
            let run = runs.iter().find(|run| run.id == id).expect(id);
            let mapped = map(run).expect(id);
            let stages = mapped.strategy.stages.runs();
            assert_eq!(
                (stages.as_str(), mapped.scenario.model.mtp_layers),
                (divided, mtp_layers),
                "{id}"
            );
        }
    }

    #[test]
    fn layers_are_divided_as_the_run_says_else_as_its_recipe_does() {
        let source = "NVIDIA-NeMo/Megatron-Bridge@1 (config DEEPSEEK_V3_PRETRAIN_CONFIG_H100_V1)";
        for (source, layout, count, divided) in [
            ("elsewhere@1", None, 4, Ok("15/16/2x15")),
            ("elsewhere@1", Some("Et*20|t*41mL"), 2, Ok("20/41")),
            (
                "elsewhere@1",
                Some("Et*4|x"),
                2,
                Err("pp_layout `Et*4|x`: expected a layout such as Et*9|t*10|t*11L"),
            ),
            (source, None, 1, Ok("61")),
            (source, None, 4, Ok("3x16/13")),
            (source, None, 8, Ok("7x8/5")),
            (
                source,
                None,
                7,
                Err(
                    "61 layers do not divide into 7 stages of which the first has 0 and the last 3 fewer",
                ),
            ),
        ] {
            let mut run = Run {
                source: source.to_owned(),
                ..Run::default()
            };
            let flags = run.flags.get_or_insert_default();
            flags.extend(layout.map(|layout| ("pp_layout".to_owned(), layout.into())));
            let found = stages(&run, 61, count).map(|stages| stages.runs());
            assert_eq!(
                found,
                divided.map(str::to_owned).map_err(str::to_owned),
                "{source} {count}"
            );
        }
    }

    #[test]
    fn groups_that_share_states_are_as_the_run_says_else_its_recipes() {
        let mut run = Run {
            source: "NVIDIA/dgxc-benchmarking@1".to_owned(),
            ..Run::default()
        };
        assert_eq!(zero_group(&run), None);
        run.flags
            .get_or_insert_default()
            .insert("framework".to_owned(), "Paxml (JAX)".into());
        assert_eq!(zero_group(&run), Some(128));
        for (stated, group) in [(8, Some(8)), (0, None)] {
            run.flags
                .get_or_insert_default()
                .insert("zero1_size".to_owned(), stated.into());
            assert_eq!(zero_group(&run), group);
        }
    }
}
