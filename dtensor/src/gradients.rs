//! Gradients while backward is derived: which tensor has which so far, and the operators that made them.

use rustc_hash::FxHashMap;

use crate::operator::Gradient;
use crate::placement::Placements;
use crate::tape::{DTensor, Record, Tape};
use crate::tensor::{TensorId, TensorRole, View, ViewKind};
use crate::trace::{Op, Pass};

/// An operator of forward whose backward is derived: its place, and its tensors.
#[derive(Clone, Copy)]
pub(crate) struct Of<'r> {
    pub(crate) index: usize,
    pub(crate) record: &'r Record,
}

/// Backward on its way through a tape's records.
pub(crate) struct Backward<'b, 'p> {
    pub(crate) tape: &'b mut Tape<'p>,
    /// By the tensor they belong to.
    so_far: FxHashMap<TensorId, DTensor>,
}

impl<'b, 'p> Backward<'b, 'p> {
    /// Begins at a block's output.
    pub(crate) fn begin(tape: &'b mut Tape<'p>, output: &DTensor) -> Self {
        let mut backward = Self {
            tape,
            so_far: FxHashMap::default(),
        };
        let seed = backward.gradient("output", output);
        backward.tape.trace.output_gradient = Some(seed.id);
        backward.so_far.insert(output.id, seed);
        backward
    }

    /// Ends: the gradient of the block's input is known.
    pub(crate) fn end(self) {
        let trace = &mut self.tape.trace;
        let input = |id: &TensorId| {
            let info = trace.tensor(*id);
            info.role == TensorRole::Input && info.storage == *id
        };
        let found = self.so_far.iter().find(|(id, _)| input(id));
        trace.input_gradient = found.map(|(_, gradient)| gradient.id);
    }

    /// Takes the gradient of a tensor.
    pub(crate) fn take(&mut self, of: &DTensor) -> Option<DTensor> {
        self.so_far.remove(&of.id)
    }

    /// A gradient tensor with the local shape of `x`.
    pub(crate) fn gradient(&mut self, name: &str, x: &DTensor) -> DTensor {
        let name = format!("{name}.gradient");
        let id = self
            .tape
            .local_like(&name, x, x.dtype, TensorRole::Gradient);
        DTensor { id, ..x.clone() }
    }

    /// A gradient of an input of the forward operator `of`, by its place among the inputs.
    pub(crate) fn of_input(&mut self, of: usize, index: usize, input: &DTensor) -> DTensor {
        let scope = &self.tape.trace.forward[of].scope;
        let name = match index {
            0 => format!("{scope}.input"),
            _ => format!("{scope}.input{index}"),
        };
        self.gradient(&name, input)
    }

    /// Appends an operator in the scope of the forward operator `of`, with what it reads and writes.
    pub(crate) fn push(
        &mut self,
        of: usize,
        pass: Pass,
        operator: Gradient,
        tensors: [Vec<TensorId>; 2],
    ) {
        let scope = self.tape.trace.forward[of].scope.clone();
        self.append(scope, pass, operator, tensors);
    }

    /// Appends an operator.
    pub(crate) fn append(
        &mut self,
        scope: String,
        pass: Pass,
        operator: Gradient,
        [inputs, outputs]: [Vec<TensorId>; 2],
    ) {
        self.tape.trace.backward.push(Op {
            scope,
            pass,
            inputs,
            outputs,
            saved: Vec::new(),
            operator,
        });
    }

    /// The gradient of what an operator added to its input is a sum; the input has the gradient itself.
    pub(crate) fn push_sum(&mut self, of: Of<'_>, gradient: DTensor, operator: Gradient) {
        let tensors = [vec![gradient.id], Vec::new()];
        self.push(of.index, Pass::BackwardWeight, operator, tensors);
        self.accumulate(&of.record.inputs[0], gradient);
    }

    /// One kernel that reads the gradient and what was kept, and writes a gradient per activation among the inputs;
    /// `placed` says where each lies, by its place among the inputs and where the input lies.
    pub(crate) fn push_one(
        &mut self,
        Of { index: of, record }: Of<'_>,
        gradient: &DTensor,
        operator: Gradient,
        placed: impl Fn(usize, Placements) -> Placements,
    ) {
        let mut reads = vec![gradient.id];
        reads.extend(&self.tape.trace.forward[of].saved);
        let mut made = Vec::new();
        for (index, input) in record.inputs.iter().enumerate() {
            if self.is_wanted(input) {
                let mut out = self.of_input(of, index, input);
                out.placements = placed(index, out.placements);
                made.push((input, out));
            }
        }
        let writes = made.iter().map(|(_, out)| out.id).collect();
        self.push(of, Pass::BackwardInput, operator, [reads, writes]);
        for (input, out) in made {
            self.accumulate(input, out);
        }
    }

    /// Whether a tensor has a gradient.
    fn is_wanted(&self, x: &DTensor) -> bool {
        let role = self.tape.trace.tensor(x.id).role;
        matches!(role, TensorRole::Activation | TensorRole::Input)
    }

    /// Adds a gradient to what a tensor has; a second one costs an addition.
    pub(crate) fn accumulate(&mut self, input: &DTensor, gradient: DTensor) {
        if !self.is_wanted(input) {
            return;
        }
        let Some(first) = self.so_far.remove(&input.id) else {
            self.so_far.insert(input.id, gradient);
            return;
        };
        let mut sum = self.gradient("sum", input);
        sum.placements = gradient.placements;
        let tensors = [vec![first.id, gradient.id], vec![sum.id]];
        let scope = "gradient_sum".to_owned();
        self.append(scope, Pass::BackwardInput, Gradient::Sum, tensors);
        self.so_far.insert(input.id, sum);
    }

    /// Has the gradient of a part written into that of the whole.
    pub(crate) fn write_part(&mut self, whole: &DTensor, part: &DTensor, kind: ViewKind) {
        let to = match self.so_far.get(&whole.id) {
            Some(gradient) => gradient.id,
            None => {
                let gradient = self.gradient("parts", whole);
                let id = gradient.id;
                self.so_far.insert(whole.id, gradient);
                id
            }
        };
        self.view(part.id, to, kind);
    }

    /// A view made before the next operator.
    pub(crate) fn view(&mut self, from: TensorId, to: TensorId, kind: ViewKind) {
        let before = self.tape.trace.backward.len();
        let views = &mut self.tape.trace.backward_views;
        views.push(View {
            before,
            from,
            to,
            kind,
        });
    }
}
