//! Operands on any device, filled with seeded numbers.

use crate::random;
use std::{any::Any, sync::Arc};
use zofo_hal::{
    DType, DeviceRef, MemorySpace, Op, Result, TensorArg, TensorSpec, Usage, Uses, Weight, WeightData, WeightRef, WeightSpec,
    perturb::NoiseParams,
};
use zofo_ops::Runner;

/// Makes the operands of an op.
///
/// It can also only ask: then it hands out operands without memory, and the op that is made of them can be shown to a device.
pub struct Lab {
    runner: Runner,
    asking: bool,
    /// Each operand has numbers of its own.
    seed: u64,
}

impl Lab {
    /// Operands on a new queue of `device`.
    ///
    /// # Errors
    /// Those of [`zofo_hal::Device::create_queue`].
    pub fn new(device: &DeviceRef) -> Result<Self> {
        Ok(Self { runner: Runner::new(device.clone())?, asking: false, seed: 0 })
    }

    /// Operands without memory, for an op that is asked about and not run.
    ///
    /// # Errors
    /// As [`Lab::new`].
    pub fn asking(device: &DeviceRef) -> Result<Self> {
        Ok(Self { asking: true, ..Self::new(device)? })
    }

    /// The queue that the operands live on.
    pub fn into_runner(self) -> Runner {
        self.runner
    }

    fn next_seed(&mut self) -> u64 {
        self.seed += 1;
        self.seed
    }

    /// A tensor whose contents do not matter: an output.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn output(&mut self, dtype: DType, rows: usize, cols: usize) -> Result<TensorArg> {
        let spec = TensorSpec::new(dtype, rows, cols);
        let bytes = if self.asking { 0 } else { spec.span_bytes() };
        Ok(TensorArg::new(self.runner.queue().alloc(bytes, Usage::Activations)?, spec))
    }

    /// A float tensor of standard normal numbers.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn normals(&mut self, dtype: DType, rows: usize, cols: usize) -> Result<TensorArg> {
        let (tensor, seed) = (self.output(dtype, rows, cols)?, self.next_seed());
        if !self.asking {
            self.runner.write_bytes(&tensor, &random::floats(seed, dtype, rows * cols, 1.0)?)?;
        }
        Ok(tensor)
    }

    /// An f32 tensor of these values.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn f32s(&mut self, rows: usize, cols: usize, values: &[f32]) -> Result<TensorArg> {
        let tensor = self.output(DType::F32, rows, cols)?;
        if !self.asking {
            self.runner.upload_f32(&tensor, values)?;
        }
        Ok(tensor)
    }

    /// A vector of u32.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn u32s(&mut self, values: &[u32]) -> Result<TensorArg> {
        let tensor = self.output(DType::U32, 1, values.len())?;
        if !self.asking {
            self.runner.upload_u32(&tensor, values)?;
        }
        Ok(tensor)
    }

    /// Noise parameters: seed 1, step 0, first direction, epsilon 0.001.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn noise(&mut self) -> Result<TensorArg> {
        let params = NoiseParams::new(1, 0, Default::default(), 1e-3);
        self.u32s(bytemuck::cast_slice(std::slice::from_ref(&params)))
    }

    /// A weight `[rows, cols]` of random numbers of the size that trained ones have.
    ///
    /// # Errors
    /// Those of [`zofo_hal::Device::import_weight`].
    pub fn weight(&mut self, dtype: DType, rows: usize, cols: usize, uses: Uses) -> Result<WeightRef> {
        let (spec, seed) = (WeightSpec { dtype, rows, cols, uses }, self.next_seed());
        if self.asking {
            return Ok(Arc::new(Question(spec)));
        }
        self.runner.device().import_weight(&spec, WeightData::Borrowed(&random::weight(seed, dtype, rows, cols)?))
    }

    /// Runs an op whose results are the operands of another.
    ///
    /// # Errors
    /// Those of [`Runner::run`].
    pub fn run(&mut self, op: impl Into<Op<TensorArg>>) -> Result<()> {
        if self.asking { Ok(()) } else { self.runner.run(op) }
    }
}

/// A weight that has no more than a type and a shape.
struct Question(WeightSpec);

impl Weight for Question {
    fn spec(&self) -> WeightSpec {
        self.0
    }
    fn bytes(&self) -> usize {
        0
    }
    fn space(&self) -> MemorySpace {
        MemorySpace::HOST
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
