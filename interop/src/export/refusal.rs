//! What a training system cannot express: refusals, notes and unmet assumptions, collected while an exporter writes,
//! and the error that lists the refusals.

use catalog::{
    AxisOrder, CudaGraphs, DType, Dispatcher, Fp8Recipe, GradientTypes, Offload, OffloadKind,
    Overlap, Precision, Runtime,
};
use plans::decisions::{Decisions, Recompute};

use super::assumptions::{Assumption, Differs};
use super::inputs::{Input, Inputs, Unfilled};
use super::job::Job;

/// A decision, or a field of the model, that the target cannot express.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The decision, as `--strategy` or the command line writes it, such as `zero=2`; or the model's field.
    pub decision: String,
    /// Why the target cannot express it.
    pub why: String,
    /// The choice to make instead, as key and value of `--strategy`; `None` if it is not a decision of the strategy.
    pub instead: Option<(&'static str, String)>,
    /// Whether the model is refused, rather than a decision.
    pub of_model: bool,
    /// The nearest target that can express the model, if the model is refused.
    pub taken_by: Option<&'static str>,
}

/// Why a plan was not exported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// The target is unknown.
    #[error("unknown target `{asked}`; {}targets: {known}", hint(nearest.as_ref()))]
    UnknownTarget {
        /// The target that was asked for.
        asked: String,
        /// The nearest known target.
        nearest: Option<String>,
        /// List of all targets.
        known: String,
    },
    /// The target has no such version.
    #[error("{target} has no version `{asked}`; versions: {known}")]
    UnknownVersion {
        /// Name of the target.
        target: String,
        /// The version that was asked for.
        asked: String,
        /// Its versions, the default first.
        known: String,
    },
    /// The target cannot express the plan.
    #[error("{target} cannot express this plan:{}", listed(refusals))]
    Inexpressible {
        /// Name and version of the target.
        target: String,
        /// What it cannot express, each with a choice that it can.
        refusals: Vec<Refusal>,
    },
}

impl ExportError {
    /// Whether the target cannot express the model, whatever the plan.
    #[must_use]
    pub fn refuses_the_model(&self) -> bool {
        matches!(self, Self::Inexpressible { refusals, .. } if refusals.iter().any(|refusal| refusal.of_model))
    }

    /// Whether the target takes the model, but not its adapters.
    #[must_use]
    pub fn refuses_adapters_alone(&self) -> bool {
        let Self::Inexpressible { refusals, .. } = self else {
            return false;
        };
        let mut of_model = refusals
            .iter()
            .filter(|refusal| refusal.of_model)
            .peekable();
        of_model.peek().is_some() && of_model.all(|refusal| refusal.decision == "model adapters")
    }
}

fn hint(nearest: Option<&String>) -> String {
    nearest.map_or_else(String::new, |t| format!("did you mean `{t}`? "))
}

fn listed(refusals: &[Refusal]) -> String {
    refusals.iter().fold(String::new(), |mut text, r| {
        text.push_str(&format!("\n  {}: {}", r.decision, r.why));
        if let Some((key, value)) = &r.instead {
            text.push_str(&format!("; nearest: {key}={value}"));
        }
        if let Some(target) = r.taken_by {
            text.push_str(&format!("; {target} takes it"));
        }
        text
    })
}

/// Collects refusals, notes, missing inputs and unmet assumptions while an exporter writes.
#[derive(Debug, Default)]
pub(crate) struct Limits {
    pub(super) refusals: Vec<Refusal>,
    pub(super) notes: Vec<String>,
    pub(super) unfilled: Vec<Unfilled>,
    pub(super) unmet: Vec<Assumption>,
    /// The plan's decisions as `key=value`, separated by commas.
    plan: String,
}

impl Limits {
    /// The limits of a plan, with nothing refused yet.
    pub(super) fn of(plan: &Decisions) -> Self {
        Self {
            plan: plan.to_string(),
            ..Self::default()
        }
    }

    /// Refuses the plan's value of a key when `refused`, offering `instead`, which is `key=value` of another value.
    pub(crate) fn refuse(&mut self, refused: bool, instead: &'static str, why: impl Into<String>) {
        let (key, value) = instead.split_once('=').unwrap_or((instead, ""));
        let decided = self.plan.split(',').find(|decided| {
            let rest = decided.strip_prefix(key);
            rest.is_some_and(|rest| rest.starts_with('='))
        });
        let decided = decided.unwrap_or(key).to_owned();
        self.refuse_as(refused, decided, why, Some((key, value.to_owned())));
    }

    /// Refuses `decision`, in words of its own, when `refused`, offering `instead`.
    pub(crate) fn refuse_as(
        &mut self,
        refused: bool,
        decision: impl Into<String>,
        why: impl Into<String>,
        instead: Option<(&'static str, String)>,
    ) {
        if refused {
            self.refusals.push(Refusal {
                decision: decision.into(),
                why: why.into(),
                instead,
                of_model: false,
                taken_by: None,
            });
        }
    }

    /// Refuses overlaps, in words of their own, when `refused`, offering the usual ones.
    pub(crate) fn refuse_overlap(&mut self, refused: bool, what: &str, why: impl Into<String>) {
        let usual = Some(("overlap", "grad+param+pp".to_owned()));
        self.refuse_as(refused, what, why, usual);
    }

    /// Refuses 8-bit products.
    pub(crate) fn refuse_fp8(&mut self, job: &Job<'_>, why: &str) {
        let fp8 = job.workload.precision == Precision::Fp8;
        self.refuse_as(fp8, "precision fp8", why, None);
    }

    /// Refuses to divide experts among ranks.
    pub(crate) fn refuse_experts(&mut self, d: &Decisions, why: &str) {
        let what = format!("ep={}, etp={}", d.ep, d.etp);
        let instead = Some(("ep", "1".to_owned()));
        self.refuse_as(d.ep > 1 || d.etp > 1, what, why, instead);
    }

    /// Refuses pipelines in another order of axes than the usual one.
    pub(crate) fn refuse_order(&mut self, d: &Decisions, why: &str) {
        let other = d.pp > 1 && d.dp() > 1 && d.axis_order != AxisOrder::TP_CP_DP_PP;
        self.refuse(other, "order=tp-cp-dp_shard-dp_replicate-pp", why);
    }

    /// Refuses to recompute anything but whole layers, and all of them.
    pub(crate) fn refuse_partial_recompute(&mut self, d: &Decisions, why: &str) {
        let whole = [Recompute::None, Recompute::Full, Recompute::Layers(0)];
        self.refuse(!whole.contains(&d.recompute), "recompute=full", why);
    }

    /// Refuses gradients and optimizer states in fewer than 32 bits, states in host memory other than those which the target
    /// `has` there, and a choice of how far ahead parameters are gathered.
    pub(crate) fn refuse_states(&mut self, job: &Job<'_>, has: Option<OffloadKind>) {
        let d = job.decisions;
        let why = "there is no switch for the types of gradients";
        self.gradient_types(job, GradientTypes::all(DType::F32), why);
        self.refuse_optimizer_states(d);
        self.refuse_offload(d, has);
        self.refuse_offload_layers(d);
        self.refuse_prefetch(d);
    }

    /// Records the types in which the target has gradients; `why` says why it has no others. Other types are refused where the plan
    /// chose them. Where the plan leaves them to its runtime, they are an assumption that the target does not meet.
    pub(crate) fn gradient_types(&mut self, job: &Job<'_>, has: GradientTypes, why: &str) {
        let assumed = job.gradient_types();
        if assumed == has {
            return;
        }
        if job.decisions.gradients.is_some() {
            let instead = Some(("grad_dtype", has.name()));
            let decided = format!("grad_dtype={}", assumed.name());
            self.refuse_as(true, decided, why, instead);
            return;
        }
        let [held, reduced] = [has.held, has.reduced].map(|of| GradientTypes::all(of).name());
        let does = match held == reduced {
            true => format!("it holds and reduces gradients in {held}"),
            false => format!("it holds gradients in {held} and reduces them in {reduced}"),
        };
        self.unmet.push(Assumption {
            differs: Differs::Gradients { assumed, has },
            why: format!("{does}: {why}"),
        });
    }

    /// Records which messages overlap under the target, which has no switch for it; `does` says what it does.
    pub(crate) fn overlaps(&mut self, d: &Decisions, has: Overlap, does: &str) {
        let own = Decisions {
            overlap: has,
            ..d.clone()
        };
        let [assumed, has] = [d, &own].map(Decisions::canonical_overlap);
        if assumed != has {
            self.unmet.push(Assumption {
                differs: Differs::Overlap { assumed, has },
                why: format!("there is no switch for it: {does}"),
            });
        }
    }

    /// Adds assumptions of the prediction that the target does not meet.
    pub(crate) fn differs(&mut self, unmet: Vec<Assumption>) {
        self.unmet.extend(unmet);
    }

    /// Refuses states in host memory, but for those that the target can keep there.
    pub(crate) fn refuse_offload(&mut self, d: &Decisions, has: Option<OffloadKind>) {
        let Some(offload) = d.offload.filter(|offload| Some(offload.kind()) != has) else {
            return;
        };
        let (why, instead) = match has {
            Some(kind) => ("it keeps other states in host memory", kind.name()),
            None => ("it keeps all states on the device", Offload::NONE),
        };
        let instead = Some(("offload", instead.to_owned()));
        self.refuse_as(true, format!("offload={}", offload.name()), why, instead);
    }

    /// Refuses activations in host memory.
    pub(crate) fn refuse_offload_layers(&mut self, d: &Decisions) {
        self.refuse(
            d.offload_layers > 0,
            "offload_layers=0",
            "it has no switch for activations of a number of layers in host memory",
        );
    }

    /// Refuses plans that say how many blocks ahead parameters are gathered, for targets without a switch for it.
    pub(crate) fn refuse_prefetch(&mut self, d: &Decisions) {
        let why = "it has no switch for how many blocks ahead parameters are gathered";
        self.refuse(d.prefetch.is_some(), "prefetch=1", why);
    }

    /// Refuses a dispatcher that is not among those the target `has`, and suggests the first.
    pub(crate) fn refuse_dispatcher(
        &mut self,
        d: &Decisions,
        runtime: &Runtime,
        has: &[Dispatcher],
    ) {
        let asked = d.dispatcher.unwrap_or(runtime.dispatcher);
        self.refuse_as(
            d.ep > 1 && !has.contains(&asked),
            format!("dispatcher={}", asked.name()),
            "it sends tokens to their experts in another way",
            has.first().map(|own| ("dispatcher", own.name().to_owned())),
        );
    }

    /// Refuses to overlap messages to experts with the passes of another micro-batch.
    pub(crate) fn refuse_expert_overlap(&mut self, d: &Decisions) {
        let why = "the next kernel waits for tokens that travel to their experts";
        self.refuse_overlap(d.ep > 1 && d.overlap.expert_parallel, "overlap=ep", why);
    }

    /// Refuses CUDA graphs when `refused`.
    pub(crate) fn refuse_graphs(&mut self, refused: bool, graphs: CudaGraphs, why: &str) {
        let instead = Some(("graphs", CudaGraphs::None.name().to_owned()));
        self.refuse_as(refused, format!("graphs={}", graphs.name()), why, instead);
    }

    /// Refuses the CUDA graphs of a plan; notes that those which a runtime captures by itself are not written.
    pub(crate) fn refuse_all_graphs(&mut self, d: &Decisions, runtime: &Runtime) {
        let why = "it has no switch for CUDA graphs";
        match d.graphs.filter(|graphs| *graphs != CudaGraphs::None) {
            Some(graphs) => self.refuse_graphs(true, graphs, why),
            None => self.note(
                runtime.graphs != CudaGraphs::None && d.graphs.is_none(),
                "no CUDA graphs are switched on; the prediction assumed them",
            ),
        }
    }

    /// Refuses an FP8 recipe that is not among those the target `has`, and suggests the first.
    pub(crate) fn refuse_recipe(&mut self, job: &Job<'_>, has: &[Fp8Recipe]) {
        let asked = job.fp8_recipe();
        self.refuse_as(
            job.workload.precision == Precision::Fp8 && !has.contains(&asked),
            format!("fp8_recipe={}", asked.name()),
            "it scales operands of 8-bit products in another way",
            has.first().map(|own| ("fp8_recipe", own.name().to_owned())),
        );
    }

    /// Refuses optimizer states in fewer than 32 bits.
    pub(crate) fn refuse_optimizer_states(&mut self, d: &Decisions) {
        let why = "its optimizer holds states in 32 bits";
        self.refuse(d.optimizer_states.is_some(), "optim_states=own", why);
    }

    /// Refuses the model for one of its fields when `refused`.
    pub(crate) fn refuse_model(
        &mut self,
        refused: bool,
        field: impl std::fmt::Display,
        why: impl Into<String>,
    ) {
        if refused {
            self.refusals.push(Refusal {
                decision: format!("model {field}"),
                why: why.into(),
                instead: None,
                of_model: true,
                taken_by: None,
            });
        }
    }

    /// Adds a note for the user.
    pub(crate) fn note(&mut self, when: bool, text: impl Into<String>) {
        if when {
            self.notes.push(text.into());
        }
    }

    /// The value given for an input, or its placeholder, which is then listed as still to be filled in.
    pub(crate) fn input_or_placeholder(
        &mut self,
        inputs: &Inputs<'_>,
        input: Input,
        what: &str,
    ) -> String {
        if let Some(given) = input.given(inputs) {
            return given.to_owned();
        }
        let (placeholder, option) = input.placeholder_and_option();
        let what = format!("{what} ({option})");
        self.placeholder(placeholder, &what).to_owned()
    }

    /// A placeholder, which is listed as still to be filled in.
    pub(crate) fn placeholder(&mut self, name: &'static str, what: &str) -> &'static str {
        self.unfilled.push(Unfilled {
            name,
            what: what.to_owned(),
            placeholder: true,
        });
        name
    }

    /// Adds an environment variable without which the launch script stops.
    pub(crate) fn variable(&mut self, name: &'static str, what: &str) {
        self.unfilled.push(Unfilled {
            name,
            what: format!("{what} (variable of the environment)"),
            placeholder: false,
        });
    }
}
