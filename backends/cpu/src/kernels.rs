//! The ops, and the one table by which a device answers, sizes scratch and runs. Files are named as in `zofo_hal::op`.

mod attention;
mod attention_backward;
mod backward;
mod forward;
mod loss;
mod matmul;
mod primitive;
mod update;

use crate::{
    device::Core,
    gemm::{Int8, Table},
    isa::Tier,
    memory::Block,
    pool::Pool,
    scratch::Carver,
    view::Mat,
};
use zofo_hal::{
    DType, Error, Lacking, Op, Operand, Result, Support, TensorArg,
    op::OperandRef,
    perturb::{self, Direction, NoiseParams},
};

/// What kernels work with.
pub(crate) struct Context<'a> {
    pub(crate) tier: Tier,
    pub(crate) gemm: &'static Table,
    pub(crate) noise: perturb::Tier,
    pub(crate) pool: &'a Pool,
    /// How activations of 8 bits are multiplied, on a device that does.
    pub(crate) int8: Option<&'static Int8>,
    block: &'a Block,
}

impl<'a> Context<'a> {
    pub(crate) fn new(core: &'a Core, block: &'a Block) -> Self {
        let &Core { tier, noise, ref pool, int8, .. } = core;
        Self { tier, gemm: Table::of(tier.isa()), noise, pool, int8, block }
    }

    /// The queue's scratch.
    fn carver(&self) -> Carver<'a> {
        Carver::of(self.block, self.int8.is_some())
    }
}

/// Scratch of an op that needs none.
fn none<O>(_: &O, _: usize, _: &mut Carver<'_>) {}

macro_rules! table {
    ($($op:ident: $run:path, $scratch:path;)*) => {
        fn known<T: Operand>(op: &Op<T>) -> bool {
            match op {
                $(Op::$op(_) => true,)*
                _ => false,
            }
        }

        /// Bytes of scratch that `op` needs on a device.
        pub(crate) fn workspace<T: Operand>(op: &Op<T>, core: &Core) -> usize {
            let (threads, mut carver) = (core.pool.threads(), Carver::measure(core.int8.is_some()));
            match op {
                $(Op::$op(op) => drop($scratch(op, threads, &mut carver)),)*
                _ => {}
            }
            carver.used()
        }

        /// Runs `op`.
        ///
        /// # Errors
        /// `Execution`.
        ///
        /// # Safety
        /// `op` passed `Op::check_submit` on a queue whose lock is held, its buffers and weights are of this backend and not mapped, and
        /// the scratch behind `cx` holds what [`workspace`] says.
        pub(crate) unsafe fn run(op: &Op<TensorArg>, cx: &Context<'_>) -> Result<()> {
            match op {
                // Safety: the caller's promise.
                $(Op::$op(op) => unsafe { $run(op, cx) },)*
                _ => Err(Error::unsupported("the CPU backend does not know this op")),
            }
        }
    };
}

table! {
    Copy: primitive::copy, none;
    Fill: primitive::fill, none;
    Cast: primitive::cast, none;
    ScaledAdd: primitive::scaled_add, none;
    Mul: primitive::mul, none;
    Map: primitive::map, none;
    RowReduce: primitive::row_reduce, none;
    GatherRows: primitive::gather_rows, none;
    ScatterRows: primitive::scatter_rows, none;
    Perturb: primitive::perturb, none;
    PhiloxWords: primitive::philox_words, none;
    SumSquares: primitive::sum_squares, none;
    MaskedSoftmax: attention::masked_softmax, attention::masked_softmax_scratch;
    ArgMax: loss::argmax, none;
    MatMul: matmul::matmul, matmul::matmul_scratch;
    Embedding: forward::embedding, forward::embedding_scratch;
    RmsNorm: forward::rms_norm, forward::rms_norm_scratch;
    LoraMatMul: matmul::lora_matmul, matmul::lora_matmul_scratch;
    PerturbLoraMatMul: matmul::perturb_lora_matmul, matmul::perturb_lora_matmul_scratch;
    Rope: attention::rope, none;
    KvAppend: attention::kv_append, none;
    Attention: attention::attention, attention::attention_scratch;
    SwiGlu: forward::swiglu, none;
    CrossEntropy: loss::cross_entropy, loss::cross_entropy_scratch;
    CandidateScores: loss::candidate_scores, loss::candidate_scores_scratch;
    BoundaryDot: forward::boundary_dot, none;
    Spread: forward::spread, none;
    RmsNormBackward: backward::rms_norm_backward, backward::rms_norm_backward_scratch;
    LoraMatMulBackward: backward::lora_matmul_backward, backward::lora_matmul_backward_scratch;
    AttentionBackward: attention_backward::attention_backward, attention_backward::attention_backward_scratch;
    SwiGluBackward: backward::swiglu_backward, none;
    CrossEntropyBackward: loss::cross_entropy_backward, loss::cross_entropy_backward_scratch;
    Sgd: update::sgd, none;
    AdamW: update::adamw, none;
    ZoUpdate: update::zo_update, update::zo_update_scratch;
}

/// Whether `op` runs: every op that is in the table does, in every float type and with every weight type.
pub(crate) fn supports<T: Operand>(op: &Op<T>) -> Support {
    if !known(op) {
        return Support::lacking(Lacking::Op, "the CPU backend does not know this op");
    }
    let mut support = Support::Native;
    op.visit(&mut |name, _, operand| {
        if let OperandRef::Weight(w) = operand
            && T::weight_spec(w).dtype == DType::U32
        {
            support = Support::lacking(Lacking::DType, alloc::format!("{name} is a u32 weight"));
        }
    });
    support
}

/// Columns that element-wise kernels hold on the stack at a time.
const CHUNK: usize = 256;

/// Rows of `cols` columns in pieces of up to [`CHUNK`].
#[derive(Clone, Copy)]
struct Grid {
    cols: usize,
    per_row: usize,
}

impl Grid {
    fn new(cols: usize) -> Self {
        Self { cols, per_row: cols.div_ceil(CHUNK) }
    }

    /// Pieces of `rows` rows.
    fn pieces(&self, rows: usize) -> usize {
        rows * self.per_row
    }

    /// Work per piece for [`Pool::split`], at `cost` per element.
    fn cost(&self, cost: usize) -> usize {
        self.cols.min(CHUNK) * cost
    }

    /// Row number, first column and number of columns of a piece.
    #[inline(always)]
    fn at(&self, piece: usize) -> (usize, usize, usize) {
        let (row, c) = if self.per_row == 1 { (piece, 0) } else { (piece / self.per_row, piece % self.per_row * CHUNK) };
        (row, c, CHUNK.min(self.cols - c))
    }
}

/// The noise parameters as they are now.
fn noise_params(noise: &Mat) -> NoiseParams {
    let words: [u32; NoiseParams::WORDS] = core::array::from_fn(|i| noise.word(0, i));
    bytemuck::cast(words)
}

/// That the direction of copy `copy` exists.
///
/// # Errors
/// `Execution`.
fn check_direction(params: &NoiseParams, copy: u32) -> Result<()> {
    let direction = Direction::from_word(params.direction).and_then(|d| d.copy(copy));
    direction.map(drop).map_err(|e| Error::execution(alloc::format!("noise parameters, copy {copy}: {}", e.message())))
}
