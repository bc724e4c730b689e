//! State while backward is derived: the gradient of each tensor so far, and the operators that compute them.

use rustc_hash::FxHashMap;

use crate::operator::Gradient;
use crate::placement::{BLOCK_AXES, Placement, Placements};
use crate::tape::{DTensor, Record, Tape};
use crate::tensor::{TensorId, TensorRole, View, ViewKind};
use crate::trace::{Op, Pass};

/// The forward operator whose backward is being derived: its index and its recorded tensors.
#[derive(Clone, Copy)]
pub(crate) struct Of<'r> {
    pub(crate) index: usize,
    pub(crate) record: &'r Record,
}

/// The derivation of backward from a tape's records, last to first.
pub(crate) struct Backward<'b, 'p> {
    pub(crate) tape: &'b mut Tape<'p>,
    /// The gradient accumulated so far, by the tensor it belongs to.
    so_far: FxHashMap<TensorId, DTensor>,
}

impl<'b, 'p> Backward<'b, 'p> {
    /// Starts from the gradient of a block's output.
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

    /// Finishes: records the gradient of the block's input.
    pub(crate) fn end(self) {
        let trace = &mut self.tape.trace;
        let input = |id: &TensorId| {
            let info = trace.tensor(*id);
            info.role == TensorRole::Input && info.storage == *id
        };
        let found = self.so_far.iter().find(|(id, _)| input(id));
        trace.input_gradient = found.map(|(_, gradient)| gradient.id);
    }

    /// Removes and returns the gradient of a tensor.
    pub(crate) fn take(&mut self, of: &DTensor) -> Option<DTensor> {
        self.so_far.remove(&of.id)
    }

    /// A new gradient tensor with the local shape of `x`.
    pub(crate) fn gradient(&mut self, name: &str, x: &DTensor) -> DTensor {
        self.named_gradient([name, ".gradient"].concat(), x)
    }

    fn named_gradient(&mut self, name: String, x: &DTensor) -> DTensor {
        let id = self.tape.local_like(name, x, x.dtype, TensorRole::Gradient);
        DTensor { id, ..x.clone() }
    }

    /// A new gradient tensor for the input at `index` of the forward operator `of`.
    pub(crate) fn of_input(&mut self, of: usize, index: usize, input: &DTensor) -> DTensor {
        let scope = &self.tape.trace.forward[of].scope;
        let name = match index {
            0 => [scope, ".input.gradient"].concat(),
            _ => format!("{scope}.input{index}.gradient"),
        };
        self.named_gradient(name, input)
    }

    /// Appends a backward operator with its inputs and outputs, in the scope of the forward operator `of`.
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

    /// Appends a backward operator in the given scope.
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

    /// Backward of an operator that adds a vector (`of_sum`) to its input: if the vector is
    /// trained, its gradient is a sum; the input's gradient is passed on.
    pub(crate) fn push_sum(
        &mut self,
        of: Of<'_>,
        gradient: DTensor,
        (operator, of_sum): (Gradient, TensorId),
    ) {
        if !self.tape.is_frozen(of_sum) {
            let tensors = [vec![gradient.id], Vec::new()];
            self.push(of.index, Pass::BackwardWeight, operator, tensors);
        }
        self.accumulate(&of.record.inputs[0], gradient);
    }

    /// Appends one operator that reads the gradient and what was saved, and writes the gradient of every input that is
    /// an activation. `placed` maps an input's index and placements to those of its gradient.
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

    /// Whether a tensor needs a gradient here: activations and the block's input do.
    fn is_wanted(&self, x: &DTensor) -> bool {
        let role = self.tape.trace.tensor(x.id).role;
        matches!(role, TensorRole::Activation | TensorRole::Input)
    }

    /// Adds a term to a tensor's gradient; from the second term on this appends an addition. The sum is partial if a term is.
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
        for axis in BLOCK_AXES {
            if first.placements.on(axis) == Placement::Partial {
                sum.placements = sum.placements.with(axis, Placement::Partial);
            }
        }
        let tensors = [vec![first.id, gradient.id], vec![sum.id]];
        let scope = "gradient_sum".to_owned();
        self.append(scope, Pass::BackwardInput, Gradient::Sum, tensors);
        self.so_far.insert(input.id, sum);
    }

    /// Writes the gradient of a part (a slice) into the gradient of the whole tensor.
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

    /// Records a view made before the next backward operator.
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
