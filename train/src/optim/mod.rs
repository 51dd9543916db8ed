//! Functions that record an optimizer, and the schedules that feed it its rate.

pub mod ema;
mod muon;
pub mod schedule;

use crate::config::{Optimizer, TrainConfig};
use engine::ops::adamw::{AdamW, global_norm};
use engine::ops::adamw8::Map;
use engine::{DType, Error, Init, Recorder, Store, Var};

/// What a step of the optimizer reports, each of one element.
pub struct Stepped<'g> {
    /// Norm of all gradients, before clipping and after.
    pub norm: Var<'g>,
    pub clipped: Var<'g>,
    /// Steps skipped so far, and in a row up to now, because the loss or the norm was not finite.
    pub skipped: Var<'g>,
    pub skipped_in_row: Var<'g>,
}

/// Clips to a global norm, then a step of the config's optimizer. A step whose loss or gradient is not finite changes nothing but the
/// counters.
pub fn step<'g>(r: &'g Recorder, params: &[(String, Var<'g>)], grads: &[Var<'g>], loss: Var<'g>, c: &TrainConfig) -> Stepped<'g> {
    let one = |name: &str| r.state(name, &[1], DType::F32, Init::Full(0.0));
    let rate = r.feed("rate", &[1], DType::F32);
    let norm = global_norm(grads);
    let finite = engine::mutant!("infinite-losses-count", norm.is_finite() * loss.is_finite(), norm.is_finite());
    let room = r.full(&[1], c.clip) / (norm + 1e-6);
    let scale = engine::mutant!("gradients-not-clipped", room, r.full(&[1], 1.0)).min(r.full(&[1], 1.0));
    let (count, skipped, row) = (one("adam.step"), one("adam.skipped"), one("adam.skipped_in_row"));
    let next = count + finite;
    let missed = -finite + 1.0;
    let (skipped_next, row_next) = (skipped + missed, (row + 1.0) * missed);
    let all = params.iter().zip(grads).map(|((name, p), g)| Param { name, p: *p, g: *g });
    let by_muon = |x: &Param| c.optimizer == Optimizer::Muon && x.p.shape().len() == 2 && r.is_in_block(x.p);
    let (matrices, others): (Vec<Param>, Vec<Param>) = all.partition(by_muon);
    let mut after = adamw(r, &others, [rate, scale, next, finite], c);
    after.extend(muon::update(r, &matrices, [rate, scale, finite], c));
    if c.ema > 0.0 {
        ema::update(r, &after, finite, c.ema);
    }
    r.update(count, next);
    r.update(skipped, skipped_next);
    r.update(row, row_next);
    Stepped { norm, clipped: norm * scale, skipped: skipped_next, skipped_in_row: row_next }
}

/// A parameter and its gradient.
struct Param<'a, 'g> {
    name: &'a str,
    p: Var<'g>,
    g: Var<'g>,
}

/// Parameters by name, with their values after the step.
type After<'g> = Vec<(String, Var<'g>)>;

/// AdamW with decay on matrices only. `numbers`: the rate, what gradients are scaled by, the step's number, whether it counts.
fn adamw<'g>(r: &'g Recorder, params: &[Param<'_, 'g>], numbers: [Var<'g>; 4], c: &TrainConfig) -> After<'g> {
    let (mut inputs, mut decay, mut states) = (numbers.to_vec(), vec![], vec![]);
    for Param { name, p, g } in params {
        let moment = |which: &str| r.state(&format!("adam.{which}/{name}"), &p.shape(), DType::F32, Init::Full(0.0));
        let (m, v) = (moment("m"), moment("v"));
        inputs.extend([*p, *g, m, v]);
        states.extend([*p, m, v]);
        decay.push(if p.shape().len() >= engine::mutant!("adamw-decays-rows-too", 2, 1) { c.weight_decay } else { 0.0 });
    }
    if states.is_empty() {
        return vec![];
    }
    let values = r.op(AdamW { beta1: c.beta1, beta2: c.beta2, eps: c.eps, decay }, &inputs);
    for (state, value) in states.into_iter().zip(&values) {
        r.update(state, *value);
    }
    params.iter().zip(values.chunks(3)).map(|(x, own)| (x.name.to_string(), own[0])).collect()
}

/// The first moment of a parameter's gradients, in whatever form an optimizer keeps it; None if no optimizer has the parameter. After one step from
/// zero it is the gradient, clipped and times a constant.
pub fn first_moment(store: &Store, param: &str) -> Result<Option<Vec<f32>>, Error> {
    for kind in ["adam", "muon"] {
        let name = format!("{kind}.m/{param}");
        if let Some(moment) = store.get(&name) {
            return moment.f32().map(Some);
        }
        let [bytes, most] = Map::Signed.names(&name);
        if let (Some(bytes), Some(most)) = (store.get(&bytes), store.get(&most)) {
            return Ok(Some(Map::Signed.dequantized(&bytes.bytes()?, &most.f32()?)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::{Cpu, Data, Device, Program, Switches};

    /// Two steps of a matrix and of a row, whose gradients are constant, in f64.
    #[test]
    fn gradients_are_clipped_together_and_matrices_alone_decay() {
        let c = TrainConfig { weight_decay: 0.5, clip: 2.0, beta2: 0.9, ..TrainConfig::default() };
        let r = Recorder::new();
        let params = vec![
            ("matrix".to_string(), r.param("matrix", &[2, 2], Init::Full(1.0))),
            ("row".to_string(), r.param("row", &[2], Init::Full(1.0))),
        ];
        let loss = params[0].1.sum() * 3.0 + params[1].1.sum() * 4.0;
        let grads = r.grad(loss, &[params[0].1, params[1].1]);
        let step = step(&r, &params, &grads, loss, &c);
        [("norm", step.norm), ("clipped", step.clipped)].into_iter().for_each(|(name, v)| r.output(name, v));
        let mut store = Store::new(0);
        let mut p = Program::load(r.finish(), &Switches::default(), &Device::cpu(Cpu::new(1)), &mut store).unwrap();
        for _ in 0..2 {
            p.run(&mut store, &[("rate", Data::F32(&[0.1]))]).unwrap();
        }
        // sqrt(4 * 9 + 2 * 16), and what is left of it.
        let norm = 68f64.sqrt();
        assert!((p.scalar("norm", &store).unwrap() as f64 - norm).abs() < 1e-5);
        assert!((p.scalar("clipped", &store).unwrap() - 2.0).abs() < 1e-5);
        // A constant gradient moves by the rate, whatever its size; before that a matrix loses a twentieth.
        let decayed = [1.0, 1.0].iter().fold(1.0, |w, _| w * 0.95 - 0.1);
        for (name, expected, gradient) in [("matrix", decayed, 3.0), ("row", 0.8, 4.0)] {
            let (w, v) = (store.get(name).unwrap().f32().unwrap(), store.get(&format!("adam.v/{name}")).unwrap().f32().unwrap());
            assert!(w.iter().all(|w| (*w as f64 - expected).abs() < 1e-5), "{name}: {w:?}, not {expected}");
            let second = (gradient * 2.0 / norm).powi(2) * (1.0 - 0.9f64.powi(2));
            assert!(v.iter().all(|v| (*v as f64 - second).abs() < 1e-5), "{name}: {v:?}, not {second}");
        }
    }

    /// What decays does so by the rate, whatever the gradient: the matrices of Muon as those of AdamW.
    #[test]
    fn muons_matrices_decay() {
        let moved = |weight_decay: f32| {
            let c = TrainConfig { weight_decay, optimizer: Optimizer::Muon, ..TrainConfig::default() };
            let r = Recorder::new();
            let matrix = r.block("layer", || r.param("matrix", &[2, 3], Init::Normal { std: 1.0 }));
            let params = vec![("matrix".to_string(), matrix)];
            let loss = matrix.square().sum();
            let grads = r.grad(loss, &[matrix]);
            step(&r, &params, &grads, loss, &c);
            let mut store = Store::new(0);
            let mut p = Program::load(r.finish(), &Switches::default(), &Device::cpu(Cpu::new(1)), &mut store).unwrap();
            let before = store.get("matrix").unwrap().f32().unwrap();
            p.run(&mut store, &[("rate", Data::F32(&[0.1]))]).unwrap();
            (before, store.get("matrix").unwrap().f32().unwrap())
        };
        let ((before, plain), (_, decayed)) = (moved(0.0), moved(0.5));
        for ((before, plain), decayed) in before.iter().zip(plain).zip(decayed) {
            assert!(*before != 0.0 && (decayed - (plain - 0.1 * 0.5 * before)).abs() < 1e-6, "{before}: {plain} and {decayed}");
        }
    }

    /// Of a matrix that Muon moves and of a row that AdamW moves, whatever may be rounded; a step that is skipped has no part in it.
    #[test]
    fn averages_are_means_of_the_weights_after_each_step_that_counts() {
        const DECAY: f32 = 0.75;
        for (optimizer, bf16) in [(Optimizer::AdamW, "off"), (Optimizer::Muon, "off"), (Optimizer::Muon, "auto")] {
            let c = TrainConfig { ema: DECAY, optimizer, ..TrainConfig::default() };
            let r = Recorder::new();
            let matrix = r.block("layer", || r.param("matrix", &[2, 3], Init::Normal { std: 1.0 }));
            let params = vec![("matrix".to_string(), matrix), ("row".to_string(), r.param("row", &[3], Init::Normal { std: 1.0 }))];
            let loss = (matrix * params[1].1).sum() * r.feed("scale", &[1], DType::F32);
            let grads = r.grad(loss, &[params[0].1, params[1].1]);
            step(&r, &params, &grads, loss, &c);
            let mut store = Store::new(0);
            let switches = Switches::default().with("bf16", bf16).unwrap();
            let mut p = Program::load(r.finish(), &switches, &Device::cpu(Cpu::new(1)), &mut store).unwrap();
            let (mut seen, mut averages) = (vec![], vec![]);
            for scale in [1.0, f32::NAN, -2.0, 0.5, f32::INFINITY] {
                p.run(&mut store, &[("rate", Data::F32(&[0.1])), ("scale", Data::F32(&[scale]))]).unwrap();
                let all = |prefix: &str| ["matrix", "row"].map(|n| store.get(&format!("{prefix}{n}")).unwrap().f32().unwrap()).concat();
                if scale.is_finite() {
                    seen.push(all(""));
                }
                averages.push((seen.len(), all(ema::PREFIX)));
            }
            assert!(seen.len() == 3 && seen[0] != seen[1] && seen[1] != seen[2]);
            for (count, average) in averages {
                let weight = |i: usize| (DECAY as f64).powi((count - 1 - i) as i32);
                let mass: f64 = (0..count).map(weight).sum();
                for (i, ours) in average.iter().enumerate() {
                    let mean = (0..count).map(|t| seen[t][i] as f64 * weight(t)).sum::<f64>() / mass;
                    assert!((*ours as f64 - mean).abs() < 1e-6, "{optimizer:?}, after {count}: {ours}, not {mean}");
                }
            }
        }
    }

    #[test]
    fn without_an_average_the_graph_has_nothing_of_it() {
        let states = |ema: f32| {
            let r = Recorder::new();
            let params = vec![("w".to_string(), r.param("w", &[2], Init::Full(1.0)))];
            let loss = params[0].1.sum();
            let grads = r.grad(loss, &[params[0].1]);
            step(&r, &params, &grads, loss, &TrainConfig { ema, ..TrainConfig::default() });
            let g = r.finish();
            (g.states().map(|(s, _)| s.name.clone()).filter(|n| n.starts_with("ema")).collect::<Vec<_>>(), g.nodes.len())
        };
        let (off, on) = (states(0.0), states(0.9));
        assert!(off.0.is_empty() && on.0 == ["ema.mass", "ema/w"] && off.1 < on.1, "{off:?} {on:?}");
    }

    /// Its gradient is a number all the same.
    #[test]
    fn a_step_whose_loss_alone_is_not_finite_changes_nothing() {
        let r = Recorder::new();
        let params = vec![("w".to_string(), r.param("w", &[2], Init::Full(1.0)))];
        let loss = params[0].1.sum() + r.feed("more", &[1], DType::F32);
        let grads = r.grad(loss, &[params[0].1]);
        r.output("skipped", step(&r, &params, &grads, loss, &TrainConfig::default()).skipped);
        let mut store = Store::new(0);
        let mut p = Program::load(r.finish(), &Switches::default(), &Device::cpu(Cpu::new(1)), &mut store).unwrap();
        for (more, moves) in [(f32::INFINITY, false), (f32::NAN, false), (1.0, true)] {
            p.run(&mut store, &[("rate", Data::F32(&[0.1])), ("more", Data::F32(&[more]))]).unwrap();
            assert_eq!(store.get("w").unwrap().f32().unwrap() != [1.0, 1.0], moves, "{more}");
        }
        assert_eq!(p.scalar("skipped", &store).unwrap(), 2.0);
    }

    /// By a matrix that is made orthogonal, whichever side is the longer.
    #[test]
    fn muon_moves_matrices_as_far_as_adamw() {
        for shape in [[2, 32], [32, 2]] {
            let c = TrainConfig { weight_decay: 0.0, optimizer: Optimizer::Muon, ..TrainConfig::default() };
            let r = Recorder::new();
            let matrix = r.block("layer", || r.param("matrix", &shape, Init::Normal { std: 1.0 }));
            let loss = (matrix.square() * matrix).sum();
            let grads = r.grad(loss, &[matrix]);
            step(&r, &[("matrix".to_string(), matrix)], &grads, loss, &c);
            let mut store = Store::new(0);
            let mut p = Program::load(r.finish(), &Switches::default(), &Device::cpu(Cpu::new(1)), &mut store).unwrap();
            let before = store.get("matrix").unwrap().f32().unwrap();
            p.run(&mut store, &[("rate", Data::F32(&[1.0]))]).unwrap();
            let after = store.get("matrix").unwrap().f32().unwrap();
            let square = before.iter().zip(&after).map(|(a, b)| (a - b).powi(2)).sum::<f32>() / before.len() as f32;
            assert!((square.sqrt() - 0.2).abs() < 0.06, "{shape:?}: {}", square.sqrt());
        }
    }
}
