//! Steps of several micro-batches: what their programs add up, which the step's last program takes and sets back to zero.

use crate::config::Optimizer;
use engine::{DType, Init, Recorder, Var};

/// Records the addition of `v` to what earlier micro-batches of the step have left.
pub fn add(r: &Recorder, name: &str, v: Var) {
    let state = r.state(&format!("scratch/{name}"), &v.shape(), DType::F32, Init::Full(0.0));
    r.update(state, state + v);
}

/// The sum of all, in the program that ends a step; the next step's begins at zero.
pub fn taken<'g>(r: &'g Recorder, name: &str, shape: &[usize]) -> Var<'g> {
    let state = r.state(&format!("scratch/{name}"), shape, DType::F32, Init::Full(0.0));
    r.update(state, r.zeros(shape));
    state
}

/// The same parameters, with the sums of their gradients, in the program that ends a step of this optimizer.
pub fn parameters<'g>(r: &'g Recorder, of: &[(String, Var)], optimizer: Optimizer) -> (Vec<(String, Var<'g>)>, Vec<Var<'g>>) {
    let same = |(name, v): &(String, Var)| {
        let param = || r.param(name, &v.shape(), Init::Full(0.0));
        // Muon moves what stands in a block.
        let in_block = optimizer == Optimizer::Muon && v.recorder().is_in_block(*v);
        let own = if in_block { r.block("", param) } else { param() };
        (name.clone(), own)
    };
    let own = of.iter().map(same).collect();
    (own, of.iter().map(|(name, v)| taken(r, &format!("grad/{name}"), &v.shape())).collect())
}

/// States that stand in line, one for each micro-batch of a step: whoever has read the first puts `next` at the end. After all of a step's micro-batches
/// each is where it was.
pub fn turn<'g>(line: &[Var<'g>], next: Var<'g>) {
    let after = line.iter().skip(1).copied().chain([next]);
    line.iter().zip(after).for_each(|(state, value)| value.recorder().update(*state, value));
}
