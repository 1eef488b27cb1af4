//! One op with its operands and what it should answer.

use crate::{estimate::Est, host::HostTensor};
use zofo_hal::{Matrix, Op, TensorArg, Uses, WeightRef};

/// What one element of an output should hold.
#[derive(Clone, Copy, Debug)]
pub enum Expect {
    /// The bits it held before.
    Untouched,
    /// Anything.
    Any,
    /// The bits of the reference device.
    Reference,
    /// A value within its bound, rounded to the output's type.
    Near(Est),
    /// As `Near` of the first bound, or of the second on a device that rounds activations to 8 bits in such a product.
    Product(Est, Est),
    /// These bits on a device with exact updates, a value near them on others.
    Sequence(f32, Est),
}

impl From<Est> for Expect {
    fn from(e: Est) -> Self {
        Self::Near(e)
    }
}

/// How a case uses an operand.
#[derive(Clone, Debug)]
pub enum Role {
    /// A tensor that is read.
    Read,
    /// A tensor that is written; an update is one that means something before.
    Output(Vec<Expect>),
    /// An imported weight.
    Weight(Uses),
}

/// An operand of a case.
#[derive(Clone, Debug)]
pub struct Operand {
    /// Its name in the op's descriptor.
    pub name: &'static str,
    /// What it holds before.
    pub tensor: HostTensor,
    /// What becomes of it.
    pub role: Role,
    /// The operand whose memory it shares.
    pub alias: Option<&'static str>,
}

/// The operands of a case on a device, by name.
pub struct Args(pub Vec<(&'static str, Matrix<TensorArg>)>);

impl Args {
    /// Tensor or weight `name`.
    ///
    /// # Panics
    /// If there is none: a bug of the case.
    pub fn m(&self, name: &str) -> Matrix<TensorArg> {
        self.0.iter().find(|(n, _)| *n == name).map(|(_, m)| m.clone()).unwrap_or_else(|| panic!("the case has no operand {name}"))
    }

    /// Tensor `name`, if the case has it.
    pub fn opt(&self, name: &str) -> Option<TensorArg> {
        self.0.iter().find_map(|(n, m)| match m {
            Matrix::Tensor(t) if *n == name => Some(t.clone()),
            _ => None,
        })
    }

    /// Tensor `name`.
    ///
    /// # Panics
    /// If there is none: a bug of the case.
    pub fn t(&self, name: &str) -> TensorArg {
        self.opt(name).unwrap_or_else(|| panic!("the case has no tensor {name}"))
    }

    pub(crate) fn push_weight(&mut self, name: &'static str, weight: WeightRef) {
        self.0.push((name, Matrix::Weight(weight)));
    }
}

type Build = Box<dyn Fn(&Args) -> Op<TensorArg> + Send + Sync>;

/// One op with its operands and what it should answer.
pub struct Case {
    /// Shapes and variant, for failure messages.
    pub what: String,
    /// The operands.
    pub operands: Vec<Operand>,
    /// Makes the op.
    pub build: Build,
}

impl Case {
    /// A case without operands yet.
    pub fn new<O: Into<Op<TensorArg>>>(what: impl Into<String>, build: impl Fn(&Args) -> O + Send + Sync + 'static) -> Self {
        Self { what: what.into(), operands: Vec::new(), build: Box::new(move |a| build(a).into()) }
    }

    fn with(mut self, name: &'static str, tensor: HostTensor, role: Role) -> Self {
        if let Role::Output(expect) = &role {
            assert_eq!(expect.len(), tensor.rows * tensor.cols, "{}: expectations of {name}", self.what);
        }
        self.operands.push(Operand { name, tensor, role, alias: None });
        self
    }

    /// A tensor that is read, or `None` for an optional one that is absent.
    pub fn read(self, name: &'static str, tensor: impl Into<Option<HostTensor>>) -> Self {
        match tensor.into() {
            Some(t) => self.with(name, t, Role::Read),
            None => self,
        }
    }

    /// An imported weight.
    pub fn weight(self, name: &'static str, tensor: HostTensor, uses: Uses) -> Self {
        self.with(name, tensor, Role::Weight(uses))
    }

    /// A tensor that is read and written.
    pub fn update(self, name: &'static str, tensor: HostTensor, expect: Vec<Expect>) -> Self {
        self.with(name, tensor, Role::Output(expect))
    }

    /// A tensor that is written; it holds NaN before.
    pub fn write(self, name: &'static str, dtype: zofo_hal::DType, rows: usize, cols: usize, expect: Vec<Expect>) -> Self {
        let bytes = crate::check::AROUND_OUTPUTS.repeat(rows * cols * dtype.block().1 / 2);
        self.with(name, HostTensor { dtype, rows, cols, bytes }, Role::Output(expect))
    }

    /// Puts output `out` exactly over operand `input`, if both have one type and shape.
    pub fn alias(mut self, out: &'static str, input: &'static str) -> Self {
        let tensor = self.operands.iter().find(|o| o.name == input).expect("the aliased operand").tensor.clone();
        let o = self.operands.iter_mut().find(|o| o.name == out).expect("the aliasing operand");
        if (o.tensor.dtype, o.tensor.rows, o.tensor.cols) == (tensor.dtype, tensor.rows, tensor.cols) {
            o.alias = Some(input);
            o.tensor = tensor;
            self.what += &format!(", {out} is {input}");
        }
        self
    }
}
