//! Core attention by cuDNN, with the execution plan of each size cached.

#![allow(unsafe_code, reason = "functions of cuDNN")]

mod attention;
mod graph;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::rc::Rc;

use super::error::CudaError;
use super::launcher::{Address, AttentionOperands};
use super::library::Name;
use super::sys::call;
use super::sys::cudnn::{
    cudnnBackendAttributeName_t::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
    cudnnBackendDescriptorType_t::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, cudnnHandle_t,
    libraryPropertyType,
};
use super::sys::driver::CUstream;
use attention::{Backward, Forward, Numbers};
use dtensor::CausalAttention;
use graph::{Descriptor, Graph, Id, Plan, Target};

/// Oldest cuDNN release used, `[major, minor]`. Older ones need workarounds, as in cudnn-frontend
/// 1.32: up to 9.15, backward is faulty if the number of keys is no multiple of 128.
const OLDEST: [i32; 2] = [9, 16];
/// Alignment in bytes of the parts of a workspace.
const GRAIN: u64 = 256;

/// cuDNN bound to one stream, with the plans made so far.
pub(super) struct Attentions {
    handle: cudnnHandle_t,
    version: [i32; 3],
    ready: RefCell<HashMap<CausalAttention, Result<Rc<Ready>, CudaError>>>,
}

/// Forward and backward plans for one attention size.
struct Ready {
    forward: (Forward, Plan),
    backward: (Backward, Plan),
}

impl Ready {
    fn new(of: &CausalAttention, target: &Target<'_>) -> Result<Self, CudaError> {
        let mut graph = Graph::default();
        let forward = attention::forward(&mut graph, of)?;
        let forward = (forward, graph.plan(target)?);
        let mut graph = Graph::default();
        let backward = attention::backward(&mut graph, of)?;
        Ok(Self {
            forward,
            backward: (backward, graph.plan(target)?),
        })
    }

    /// Bytes of workspace of forward and backward.
    fn workspaces(&self, of: &CausalAttention) -> [u64; 2] {
        let [gradients, deltas] = of.sums();
        let backward = self.backward.1.workspace.next_multiple_of(GRAIN);
        [self.forward.1.workspace, backward + gradients + deltas]
    }
}

/// Bytes of workspace that cuDNN asks for, forward and backward, on a GPU described in cuDNN's own JSON. No GPU is
/// needed: kernels are compiled for it, not run. NVRTC and cuBLASLt must have been loaded.
///
/// # Errors
/// When the library is missing, does not take the description, or has no engine for the sizes.
pub fn attention_workspaces(device: &str, of: &CausalAttention) -> Result<[u64; 2], CudaError> {
    let properties = Descriptor::new(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)?
        .with(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, device.as_bytes())?
        .finish()?;
    let ready = Ready::new(of, &Target::Described(&properties))?;
    Ok(ready.workspaces(of))
}

/// Version of the loaded cuDNN: major, minor, patch.
fn version() -> Result<[i32; 3], CudaError> {
    let mut version = [0; 3];
    let parts = [
        libraryPropertyType::MAJOR_VERSION,
        libraryPropertyType::MINOR_VERSION,
        libraryPropertyType::PATCH_LEVEL,
    ];
    for (part, number) in parts.into_iter().zip(&mut version) {
        // SAFETY: writes one number.
        unsafe { call!(cudnn::cudnnGetProperty(part, number)) }?;
    }
    Ok(version)
}

fn dotted(version: &[i32]) -> String {
    let numbers: Vec<String> = version.iter().map(i32::to_string).collect();
    numbers.join(".")
}

impl Attentions {
    /// Loads cuDNN and binds it to a stream; fails if its version is too old.
    pub(super) fn new(stream: CUstream) -> Result<Self, CudaError> {
        let path = &Name::Cudnn.open()?.path;
        let version = version()?;
        if version[..2] < OLDEST[..] {
            return Err(CudaError::Old {
                library: Name::Cudnn,
                release: dotted(&version),
                path: path.clone(),
                oldest: dotted(&OLDEST),
            });
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: a context is current, and the stream is of it.
        unsafe {
            call!(cudnn::cudnnCreate(&raw mut handle))?;
            call!(cudnn::cudnnSetStream(handle, stream.cast()))?;
        }
        Ok(Self {
            handle,
            version,
            ready: RefCell::default(),
        })
    }

    /// The plans for a size, made on first use. A size that cuDNN does not support fails here.
    fn ready(&self, of: &CausalAttention) -> Result<Rc<Ready>, CudaError> {
        if let Some(known) = self.ready.borrow().get(of) {
            return known.clone();
        }
        let target = Target::Device(self.handle);
        let ready = Ready::new(of, &target).map(Rc::new);
        self.ready.borrow_mut().insert(*of, ready.clone());
        ready
    }

    /// Library name and version if it made a plan for any size, else why it ran nothing.
    pub(super) fn part(&self) -> Result<String, String> {
        let name = format!("{} {}", Name::Cudnn, dotted(&self.version));
        let mut why = Err(format!("{name} was not asked to run attention"));
        for ready in self.ready.borrow().values() {
            match ready {
                Ok(_) => return Ok(name),
                Err(error) => why = Err(format!("{name} has no engine for the sizes: {error}")),
            }
        }
        why
    }

    pub(super) fn workspaces(&self, of: &CausalAttention) -> Option<[u64; 2]> {
        self.ready(of).ok().map(|ready| ready.workspaces(of))
    }

    pub(super) fn attend(
        &self,
        of: &CausalAttention,
        operands: &AttentionOperands,
    ) -> Result<(), CudaError> {
        let ready = self.ready(of);
        let ready = ready.expect("who asks has been told of its workspace");
        let given = Given {
            scale: operands.scale,
            lowest: f32::NEG_INFINITY,
            window: of.window.map_or(0, |keys| keys as i32),
            one: 1.0,
        };
        let pairs = |ids: &[Id], at: &[Address]| -> Vec<(Id, *const c_void)> {
            let at = at.iter().map(|&at| at as *const c_void);
            ids.iter().copied().zip(at).collect()
        };
        let Some(gradients) = operands.gradients else {
            let (forward, plan) = &ready.forward;
            let mut all = pairs(&forward.tensors, &operands.tensors);
            all.extend(given.pairs(&forward.numbers));
            // SAFETY: the caller vouches for the addresses; the numbers live until this returns.
            return unsafe { plan.run(self.handle, &all, operands.workspace as *const c_void) };
        };
        let (backward, plan) = &ready.backward;
        let sums = operands.workspace + plan.workspace.next_multiple_of(GRAIN);
        let sums = [sums, sums + of.sums()[0]];
        let mut all = pairs(&backward.tensors, &operands.tensors);
        all.extend(pairs(&backward.gradients, &gradients));
        all.extend(pairs(&backward.sums, &sums));
        all.extend(given.pairs(&backward.numbers));
        // SAFETY: as above.
        unsafe { plan.run(self.handle, &all, operands.workspace as *const c_void) }
    }

    /// Destroys all plans and the handle.
    ///
    /// # Safety
    /// No queued work may still use it, and it must not be used afterwards.
    pub(super) unsafe fn release(&self) {
        self.ready.borrow_mut().clear();
        // SAFETY: made here, used no more; a failure here cannot be handled.
        let _ = unsafe { call!(cudnn::cudnnDestroy(self.handle)) };
    }
}

/// Scalars of a call, which the library reads during the call.
struct Given {
    scale: f32,
    lowest: f32,
    window: i32,
    one: f32,
}

impl Given {
    fn pairs(&self, numbers: &Numbers) -> Vec<(Id, *const c_void)> {
        let mut pairs = vec![
            (numbers.scale, std::ptr::from_ref(&self.scale).cast()),
            (numbers.lowest, std::ptr::from_ref(&self.lowest).cast()),
        ];
        let window = std::ptr::from_ref(&self.window).cast();
        pairs.extend(numbers.window.map(|id| (id, window)));
        let one = std::ptr::from_ref(&self.one).cast();
        pairs.extend(numbers.one.map(|id| (id, one)));
        pairs
    }
}
