//! The momentum of gradients and the direction that it gives (Nesterov's), as Muon has them:
//!
//! ```text
//! m <- beta m + (1 - beta) g          u = (1 - beta) g + beta m
//! ```

use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io};
use crate::meta::Meta;
use crate::op::{Cost, Grads, Narrow, Op, Port};
use crate::record::Var;

/// Inputs: gradient scale `[1]`, a flag `[1]` that is 0 to keep the momentum as it is, the gradient, the momentum. Outputs: the direction u, the
/// momentum's next value. Composite: the pass `adam8bit` may keep the momentum in fewer bits, otherwise `decompose` writes it out.
#[derive(Debug)]
pub struct Momentum {
    /// How much of the momentum is kept.
    pub beta: f32,
}

impl Op for Momentum {
    fn name(&self) -> &'static str {
        "momentum"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert!(x.len() == 4 && x[2] == x[3], "momentum of {x:?}");
        vec![x[2].clone(), x[3].clone()]
    }

    fn cpu(&self, _: &[View], _: &mut [ViewMut], _: &mut [f32]) {
        unreachable!("a pass or the unfused form stands in for it")
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, _: &Io) -> Code {
        unreachable!("a pass or the unfused form stands in for it")
    }

    fn apart(&self) -> Vec<(Vec<usize>, Vec<usize>)> {
        vec![(vec![2, 3], vec![0, 1])]
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        unreachable!("replaced before gradients are written out")
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(2 * (x[2].bytes() + x[3].bytes()))
    }

    fn is_composite(&self) -> bool {
        true
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let (go, g, m) = (x[1], x[2] * x[0], x[3]);
        let next = m + (g - m) * (1.0 - self.beta);
        let kept = go.choose(next, m);
        Some(vec![g + (next - g) * self.beta, kept])
    }
}

/// Records the direction and the momentum's next value.
#[track_caller]
pub fn momentum<'g>(beta: f32, scale: Var<'g>, go: Var<'g>, g: Var<'g>, m: Var<'g>) -> [Var<'g>; 2] {
    let y = g.recorder().op(Momentum { beta }, &[scale, go, g, m]);
    [y[0], y[1]]
}
