use super::*;
use crate::graph::Init;
use crate::ops::few_rows::FewRows;
use crate::passes::{Switches, Target};
use crate::program::Compiled;
use crate::record::Recorder;

#[test]
fn only_what_nothing_writes_is_read_before_its_turn() {
    let r = Recorder::new();
    let x = r.feed("x", &[3, 64], DType::F32).cast(DType::BF16);
    let state = |name: &str| r.state(name, &[64, 64], DType::BF16, Init::Full(1.0));
    let product = |x, w| r.op1(FewRows { norm: None, swiglu: false, add: false, dtype: None }, &[x, w]);
    let (kept, changed) = (state("kept"), state("changed"));
    let y = product(product(product(x, kept), changed), kept.silu());
    r.update(changed, changed * 2.0);
    r.output("y", y);
    r.output("four", x.nf4_linear(r.nf4("four", 8, 64)));
    let arch = Arch { sm: 90, multiprocessors: 132 };
    let c = Compiled::new(r.finish(), &Switches::default(), Target::Cuda(arch)).unwrap();
    let texts = codes(&c.graph, &c.plan.spots, arch).flat_map(|code| code.steps).filter_map(|s| Some(s.kernel()?.text()));
    // Weights that come in whole rows are early ones.
    let early = |t: String| t.contains("few_rows_whole(") || t.contains("#define EARLY 1");
    let early: Vec<bool> = texts.filter(|t| t.contains("few_rows") || t.contains("nf4_few(")).map(early).collect();
    assert_eq!(early, [true, true, false, true]);
}
