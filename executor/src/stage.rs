//! The virtual stages of a rank: their blocks, their parameters, and the groups that share these.

use std::sync::Arc;

use catalog::Zero;
use comm::Group;
use cpu_device::Numerics;
use dtensor::BlockPosition;
use dtensor::train::{Made, Sharing, Stage, States, StatesPlan};
use models::BlockLayout;
use models::stage::Recipe;

use crate::device::Device;
use crate::error::ExecutorError;
use crate::job::Job;
use crate::mesh::Mesh;
use crate::settings::Execution;

/// Channels of parameter all-gathers, dense and expert: separate from the gradients', which may overlap with them.
const PARAMETERS: [u64; 2] = [15, 25];

impl Job {
    /// The layout of the job's blocks.
    pub(crate) fn layout(&self) -> BlockLayout {
        BlockLayout::of(&self.strategy, self.seq_len, self.precision)
    }

    /// Makes a virtual stage of a rank.
    pub(crate) fn stage<D: Device>(
        &self,
        device: &D,
        sharing: [Sharing<Group>; 2],
        position: &BlockPosition,
        stage: u64,
    ) -> Result<Stage<D>, ExecutorError> {
        let layout = self.layout();
        let recipes = Recipe::of_stage(&self.model, &self.strategy, stage);
        let blocks = recipes
            .iter()
            .map(|recipe| {
                Ok(Arc::new(recipe.block(
                    &self.model,
                    &layout,
                    D::ATTENTION,
                )?))
            })
            .collect::<Result<Vec<_>, ExecutorError>>()?;
        let slots = models::stage::slots(&self.model, &recipes, &blocks, position);
        let states = StatesPlan {
            zero: self.strategy.zero,
            dtype: self.dtype(),
            exact: self.settings.numerics == Numerics::Exact,
            bucket: self.settings.gradient_bucket,
            seed: self.settings.seed,
        };
        let states = States::new(device, slots, sharing, states)?;
        let made = (self.settings.execution == Execution::Eager).then(|| {
            let model = self.model.clone();
            let made: Made<ExecutorError> = Box::new(move |_, index| {
                let block = recipes[index].block(&model, &layout, D::ATTENTION)?;
                Ok(Arc::new(block))
            });
            made
        });
        Ok(Stage::new(blocks, made, states))
    }
}

/// The groups that share a rank's dense and expert states.
pub(crate) fn sharing(mesh: &Mesh, rank: usize, zero: Zero) -> [Sharing<Group>; 2] {
    let sharded = zero != Zero::Z0;
    let place = mesh.place(rank);
    let alone = Group::single(rank);
    let tp = mesh.group(rank, 14, |p| (p.pp, p.dp_replicate, p.dp_shard, p.cp));
    let all = mesh.group(rank, 12, |p| (p.pp, p.tp));
    let shard = if sharded {
        mesh.group(rank, 10, |p| (p.pp, p.tp, p.dp_replicate))
    } else {
        alone.clone()
    };
    let dense = Sharing {
        gather: shard.on(PARAMETERS[0]),
        shard,
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
    let shard = if sharded {
        mesh.group(rank, 20, |p| (p.pp, p.ep, p.etp, p.edp / copies))
    } else {
        alone
    };
    let expert = Sharing {
        gather: shard.on(PARAMETERS[1]),
        shard,
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
