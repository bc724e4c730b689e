//! A virtual stage on one rank: its blocks, its states, and its passes.

use std::collections::HashMap;
use std::sync::Arc;

use catalog::model::ModelConfig;
use catalog::{Bytes, Precision, Zero};
use cpu_device::Numerics;
use dtensor::block::{Attention, Block, Half, Keep};
use dtensor::{BlockPosition, TensorRole};
use models::{BlockClass, BlockLayout};
use plans::{Recompute, Strategy};

use crate::device::{Device, Passing};
use crate::error::ExecutorError;
use crate::mesh::Mesh;
use crate::report::Routed;
use crate::settings::Execution;
use crate::slots;
use crate::states::{Sharing, States};

/// A virtual stage.
pub(crate) struct Stage<D: Device> {
    blocks: Vec<Arc<Block>>,
    eager: Option<Eager>,
    pub(crate) states: States<D>,
    /// By micro-batch.
    saved: HashMap<u32, Vec<Kept<D>>>,
    /// Rows that reached this rank's experts since they were last taken.
    routed: Vec<Routed>,
}

/// A block that has run forward, and what it keeps.
type Kept<D> = (Arc<Block>, <D as Device>::Saved);

/// What it takes to run a stage's model code for every micro-batch.
struct Eager {
    model: ModelConfig,
    layout: BlockLayout,
    recipes: Vec<Recipe>,
}

/// How a block is made.
struct Recipe {
    class: BlockClass,
    /// Put before scopes.
    prefix: String,
    layer: Option<u64>,
    keep: Keep,
}

/// What a stage is made of.
pub(crate) struct Plan<'p> {
    pub(crate) model: &'p ModelConfig,
    pub(crate) strategy: &'p Strategy,
    pub(crate) seq_len: u64,
    pub(crate) precision: Precision,
    pub(crate) seed: u64,
    pub(crate) gradient_bucket: Bytes,
    pub(crate) execution: Execution,
    pub(crate) numerics: Numerics,
}

/// A backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward {
    pub(crate) half: Half,
    /// Whether gradients are whole after it and leave for their sums block by block.
    pub(crate) reduces: bool,
}

impl<D: Device> Stage<D> {
    pub(crate) fn new(
        plan: &Plan<'_>,
        device: &D,
        sharing: [Sharing; 2],
        position: &BlockPosition,
        stage: u64,
    ) -> Result<Self, ExecutorError> {
        let layout = BlockLayout::of(plan.strategy, plan.seq_len, plan.precision);
        let recipes = Recipe::of_stage(plan, stage)?;
        let blocks = recipes
            .iter()
            .map(|recipe| Ok(Arc::new(recipe.block(plan.model, &layout, D::ATTENTION)?)))
            .collect::<Result<Vec<_>, ExecutorError>>()?;
        let slots = slots::slots(plan.model, &blocks, position);
        let eager = (plan.execution == Execution::Eager).then(|| Eager {
            model: plan.model.clone(),
            layout,
            recipes,
        });
        let states = States::new(
            device,
            slots,
            sharing,
            (
                plan.strategy.zero,
                plan.precision.activation(),
                plan.numerics,
            ),
            plan.gradient_bucket,
            plan.seed,
        )?;
        Ok(Self {
            blocks,
            eager,
            states,
            saved: HashMap::new(),
            routed: Vec::new(),
        })
    }

    /// Bytes kept for backward.
    pub(crate) fn saved_bytes(&self) -> u64 {
        let kept = self.saved.values().flatten();
        kept.map(|(_, saved)| D::saved_bytes(saved)).sum()
    }

    /// Takes what is known of the rows that reached this rank's experts.
    pub(crate) fn take_routed(&mut self) -> Vec<Routed> {
        std::mem::take(&mut self.routed)
    }

    pub(crate) fn forward(
        &mut self,
        device: &D,
        batch: &D::Batch<'_>,
        micro_batch: u32,
        input: Option<D::Tensor>,
    ) -> Result<D::Tensor, ExecutorError> {
        let mut kept = Vec::with_capacity(self.blocks.len());
        let mut x = input;
        for index in 0..self.blocks.len() {
            let block = match &self.eager {
                None => Arc::clone(&self.blocks[index]),
                Some(eager) => {
                    let recipe = &eager.recipes[index];
                    Arc::new(recipe.block(&eager.model, &eager.layout, D::ATTENTION)?)
                }
            };
            let parameters = self.states.parameters(index);
            let forward = device.forward(&block, batch, &parameters, x.take())?;
            if let (Some(rows), Some(layer)) = (forward.routed, block.layer) {
                self.routed.push(Routed {
                    micro_batch,
                    layer,
                    rows,
                });
            }
            kept.push((block, forward.saved));
            x = Some(forward.output);
        }
        self.saved.insert(micro_batch, kept);
        // A stage without blocks passes its input on.
        Ok(x.expect("the first stage has the embedding, every other an input"))
    }

    pub(crate) fn backward(
        &mut self,
        device: &D,
        batch: &D::Batch<'_>,
        micro_batch: u32,
        gradient: Option<D::Tensor>,
        pass: Backward,
    ) -> Result<Option<D::Tensor>, ExecutorError> {
        let Backward { half, reduces } = pass;
        let mut kept = self.saved.remove(&micro_batch).unwrap_or_default();
        let mut gradient = gradient;
        for (index, (block, saved)) in kept.iter_mut().enumerate().rev() {
            let (parameters, mut gradients) = self.states.block(device, index)?;
            let passing = Passing {
                saved,
                gradient: gradient.take(),
                half,
            };
            gradient = device.backward(block, batch, &parameters, passing, &mut gradients)?;
            if reduces {
                self.states.send_gradients(device, index)?;
            }
        }
        if half == Half::Input {
            self.saved.insert(micro_batch, kept);
        }
        Ok(gradient)
    }
}

impl Recipe {
    /// The blocks of a virtual stage, in order.
    fn of_stage(plan: &Plan<'_>, stage: u64) -> Result<Vec<Self>, ExecutorError> {
        let (model, s) = (plan.model, plan.strategy);
        let whole = |class| Self {
            class,
            prefix: String::new(),
            layer: None,
            keep: Keep::All,
        };
        let names = models::names::names(model);
        let mut recipes = Vec::new();
        if stage == 0 {
            recipes.push(whole(BlockClass::Embedding));
        }
        let first: u64 = s.stages.0[..stage as usize].iter().sum();
        for offset in 0..s.stages.0[stage as usize] {
            let layer = first + offset;
            let keep = match s.recompute.of_layer(offset) {
                Recompute::None | Recompute::Layers(_) => Keep::All,
                Recompute::Selective => Keep::NotAttention,
                Recompute::Full => Keep::Input,
                Recompute::SelectiveOps => {
                    return Err(ExecutorError::Model {
                        model: model.name.clone(),
                        reason:
                            "recompute=selective_ops is torchtitan's; use none, selective, full or \
                             layers:N"
                                .to_owned(),
                    });
                }
            };
            recipes.push(Self {
                class: BlockClass::Layer(model.layer_class(layer)),
                prefix: names.layer.replace("{layer}", &layer.to_string()),
                layer: Some(layer),
                keep,
            });
        }
        if stage + 1 == s.stages.0.len() as u64 {
            recipes.push(whole(BlockClass::Head));
        }
        Ok(recipes)
    }

    /// Runs the model's code and makes what it recorded ready.
    fn block(
        &self,
        model: &ModelConfig,
        layout: &BlockLayout,
        attention: Attention,
    ) -> Result<Block, ExecutorError> {
        let trace = models::trace_block(model, self.class, layout)?;
        Ok(Block::with_attention(
            trace,
            &self.prefix,
            self.layer,
            self.keep,
            attention,
        ))
    }
}

/// Local shape of the hidden state between layers: what a stage passes to the next.
pub(crate) fn hidden(
    plan: &Plan<'_>,
    position: &BlockPosition,
) -> Result<Vec<usize>, ExecutorError> {
    let layout = BlockLayout::of(plan.strategy, plan.seq_len, plan.precision);
    let class = BlockClass::Layer(plan.model.layer_class(0));
    let trace = models::trace_block(plan.model, class, &layout)?;
    let mut tensors = trace.tensors.iter();
    let input = tensors.find(|t| t.role == TensorRole::Input);
    let input = input.expect("a layer has an input");
    let indices = position.all_indices(&input.global, &input.placements);
    Ok(indices.iter().map(Vec::len).collect())
}

/// Who shares dense and expert states with a rank.
pub(crate) fn sharing(mesh: &Mesh, rank: usize, zero: Zero) -> [Sharing; 2] {
    let sharded = zero != Zero::Z0;
    let place = mesh.place(rank);
    let alone = comm::Group::single(rank);
    let tp = mesh.group(rank, 14, |p| (p.pp, p.dp_replicate, p.dp_shard, p.cp));
    let all = mesh.group(rank, 12, |p| (p.pp, p.tp));
    let dense = Sharing {
        shard: if sharded {
            mesh.group(rank, 10, |p| (p.pp, p.tp, p.dp_replicate))
        } else {
            alone.clone()
        },
        replicate: if sharded {
            mesh.group(rank, 11, |p| (p.pp, p.tp, p.cp, p.dp_shard))
        } else {
            all.clone()
        },
        all,
        all_with_tp: mesh.group(rank, 13, |p| p.pp),
        tp: tp.clone(),
        speaks: if sharded {
            place.dp_replicate == 0
        } else {
            (place.dp_replicate, place.dp_shard, place.cp) == (0, 0, 0)
        },
    };
    let copies = mesh.expert_shard_size();
    let all = mesh.group(rank, 22, |p| (p.pp, p.ep, p.etp));
    let expert = Sharing {
        shard: if sharded {
            mesh.group(rank, 20, |p| (p.pp, p.ep, p.etp, p.edp / copies))
        } else {
            alone
        },
        replicate: if sharded {
            mesh.group(rank, 21, |p| (p.pp, p.ep, p.etp, p.edp % copies))
        } else {
            all.clone()
        },
        all_with_tp: all.clone(),
        all,
        tp,
        speaks: if sharded {
            place.edp / copies == 0
        } else {
            place.edp == 0
        },
    };
    [dense, expert]
}

/// Refuses models with something that has no cpu kernel, before any rank starts.
pub(crate) fn check(model: &ModelConfig) -> Result<(), ExecutorError> {
    let reason = if model.constants.rope_scaling == catalog::RopeScaling::Other {
        Some("this rope_type (default, linear, llama3 and yarn are)")
    } else if model.mtp_layers > 0 {
        Some("prediction modules; set num_nextn_predict_layers to 0 to train without them")
    } else {
        None
    };
    match reason {
        Some(reason) => Err(ExecutorError::Model {
            model: model.name.clone(),
            reason: reason.to_owned(),
        }),
        None => Ok(()),
    }
}
