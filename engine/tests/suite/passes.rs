//! Every pass against itself switched off; receipts, modes, and the errors of bad settings.

use kiln_engine::check::Verdict;
use kiln_engine::graph::Graph;
use kiln_engine::kernel::Arch;
use kiln_engine::op::Fill;
use kiln_engine::ops::experts::mixture;
use kiln_engine::ops::linear_attention::LinearAttentionGrad;
use kiln_engine::ops::rope::Pairs;
use kiln_engine::passes::{Mode, Numerics, Pass, Receipt, Settings, Stage, Switch, Target, all, all_applied};
use kiln_engine::{Cpu, DType, Data, Device, Error, Extension, Init, PASSES, Program, Recorder, Store, Switches, Var, check};

#[test]
fn every_pass_off_and_on() {
    let (mut problems, mut unchecked) = (vec![], vec![]);
    for p in all() {
        match check::check_pass(p, &Device::cpu(Cpu::new(2))).verdict {
            Verdict::Passed(_) => {}
            Verdict::Failed(problem) => problems.push(format!("{}: {problem}", p.name())),
            Verdict::NotChecked(why) => {
                assert!(why.contains("needs a GPU"), "{why}");
                unchecked.push(p.name());
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    // A pass that did nothing has not passed.
    assert_eq!(unchecked, all().filter(|p| p.needs_gpu()).map(|p| p.name()).collect::<Vec<_>>());
    assert_eq!(unchecked.len(), 8);
}

#[test]
fn passes_run_stage_by_stage_and_behind_what_they_need() {
    let mut seen: Vec<&str> = vec![];
    let mut stage = Stage::Recorded;
    for p in PASSES {
        assert!(
            p.stage() >= stage && p.stage() > Stage::Recorded,
            "{} belongs to stage {:?}, behind one of {stage:?}",
            p.name(),
            p.stage()
        );
        for needed in p.after() {
            assert!(PASSES.iter().any(|q| q.name() == *needed), "{} is to run behind {needed}, which is no pass", p.name());
            assert!(seen.contains(needed), "{} runs before {needed}", p.name());
        }
        stage = p.stage();
        seen.push(p.name());
    }
    assert_eq!(stage, Stage::Lowered);
    let mut names: Vec<&str> = all().map(|p| p.name()).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), all().count(), "no two switches have the same name");
}

#[test]
fn what_every_program_needs_cannot_be_switched_off() {
    let required: Vec<&str> = all().filter(|p| p.required()).map(|p| p.name()).collect();
    assert_eq!(required, ["decompose", "autodiff", "layout"]);
    for name in required {
        let problem = Switches::default().with(name, "off").unwrap_err().to_string();
        assert!(problem.contains(name) && problem.contains("cannot be switched off"), "{problem}");
    }
}

/// The examples of all other passes run with any one pass off, and compute what they compute with all of them on.
#[test]
fn one_pass_switched_off_breaks_no_other() {
    let device = Device::cpu(Cpu::new(2));
    let graph = |example: &dyn Switch| {
        let r = Recorder::new();
        example.example(&r);
        r.finish()
    };
    for example in PASSES {
        let names: Vec<String> = graph(*example).outputs.iter().map(|o| o.0.clone()).collect();
        let feeds = check::feeds_of(&graph(*example));
        let run = |switches: &Switches| {
            let mut store = Store::new(1);
            let mut p = Program::load(graph(*example), switches, &device, &mut store).unwrap_or_else(|e| panic!("{}: {e}", example.name()));
            let given: Vec<(&str, Data)> = feeds.iter().map(|(n, d)| (n.as_str(), d.data())).collect();
            p.run(&mut store, &given).unwrap();
            names.iter().map(|n| p.read(n, &store).unwrap()).collect::<Vec<_>>()
        };
        let on = run(&Switches::default());
        for off in all().filter(|s| !s.required() && !s.needs_gpu() && s.default_mode() != Mode::Off) {
            let found = run(&Switches::default().with(off.name(), "off").unwrap());
            for ((name, a), b) in names.iter().zip(&on).zip(&found) {
                let size = a.iter().map(|v| (*v as f64).powi(2)).sum::<f64>().sqrt();
                let apart = a.iter().zip(b).map(|(x, y)| (*x as f64 - *y as f64).powi(2)).sum::<f64>().sqrt();
                assert!(
                    apart <= 0.03 * size + 1e-6,
                    "{} without {}: {name} is off by {apart:.1e} of {size:.1e}",
                    example.name(),
                    off.name()
                );
            }
        }
    }
}

/// A golden file is compared by direction alone where a pass that rounds is on: by default none may be.
#[test]
fn without_being_asked_no_pass_rounds_f32() {
    let arch = Arch { sm: 90, multiprocessors: 132 };
    for target in [Target::Cpu, Target::Cuda(arch)] {
        let rounds = |p: &&dyn Switch| p.numerics(target, DType::F32) == Numerics::LowPrecision && p.default_mode() != Mode::Off;
        assert_eq!(all().filter(rounds).map(|p| p.name()).collect::<Vec<_>>(), [""; 0], "{target:?}");
    }
}

#[test]
fn settings_that_are_wrong_are_named() {
    let error = |pass: &str, value: &str| Switches::default().set(pass, value).unwrap_err().to_string();
    assert!(error("fuse-pointwize", "auto").contains("did you mean 'fuse-pointwise'"));
    assert!(error("recompute", "maybe").contains("'maybe' is not off, auto or require"));
    assert!(error("linear-cross-entropy", "auto,chonk=3").contains("chunk"));
    assert!(error("in-place", "auto,chunk").contains("is not setting=value"));
}

#[test]
fn require_turns_a_declined_site_into_an_error() {
    let graph = || {
        let r = Recorder::new();
        let w = r.param("w", &[4], Init::Full(1.0));
        let loss = w.square().sum();
        r.output("dw", r.grad(loss, &[w])[0]);
        r.finish()
    };
    let switches = |v: &str| Switches::default().with("recompute", v).unwrap();
    let c = kiln_engine::Compiled::new(graph(), &switches("auto"), Target::Cpu).unwrap();
    let receipt = c.receipts.iter().find(|r| r.pass == "recompute").unwrap();
    assert_eq!((receipt.mode, receipt.applied, receipt.sites()), (Mode::Auto, 0, 1));
    assert!(matches!(kiln_engine::Compiled::new(graph(), &switches("require"), Target::Cpu).err(), Some(Error::Declined { .. })));
    // nothing to apply to at all
    let flash = Switches::default().with("flash-attention", "require").unwrap();
    let c = kiln_engine::Compiled::new(graph(), &flash, Target::Cpu).unwrap();
    assert!(matches!(all_applied(std::iter::once(&c.receipts[..])), Err(Error::NoSites(p)) if p == "flash-attention"));
}

/// What a pass did, and the ops that are left.
fn compiled(pass: &str, switches: Switches, record: impl Fn(&Recorder)) -> (usize, Vec<String>, Vec<String>) {
    let r = Recorder::new();
    record(&r);
    let c = kiln_engine::Compiled::new(r.finish(), &switches, Target::Cpu).unwrap();
    let receipt = c.receipts.iter().find(|r| r.pass == pass).unwrap();
    let op = |i: usize| format!("{} {:?}", c.graph.nodes[i].name(), c.graph.inputs(i));
    let ops = (0..c.graph.nodes.len()).filter(|&i| c.graph.nodes[i].name().contains("norm")).map(op).collect();
    (receipt.applied, receipt.declined.iter().map(|d| d.0.clone()).collect(), ops)
}

#[test]
fn a_norm_adds_only_where_that_saves_something() {
    let run = |record: fn(Var, Var, Var, Var)| {
        let (applied, declined, _) = compiled("fuse-norm", Switches::default(), |r| {
            let state = |name: &str, shape: &[usize]| r.state(name, shape, DType::F32, Init::Full(1.0));
            record(state("a", &[6, 8]), state("b", &[6, 8]), state("row", &[8]), state("w", &[8]));
        });
        (applied, declined.join(", "))
    };
    assert_eq!(run(|a, b, _, w| a.recorder().output("y", (a + b).rms_norm(w, 1e-6))), (1, String::new()));
    assert_eq!(run(|a, _, row, w| a.recorder().output("y", (row + a).rms_norm(w, 1e-6))), (1, String::new()));
    assert_eq!(
        run(|a, b, _, w| {
            let s = a + b;
            a.recorder().output("y", s.rms_norm(w, 1e-6));
            a.recorder().output("s", s);
        }),
        (1, String::new())
    );
    let refused = |record: fn(Var, Var, Var, Var), why: &str| {
        let (applied, declined) = run(record);
        assert!(applied == 0 && declined.contains(why), "{applied} {declined}");
    };
    refused(
        |a, _, row, w| {
            let s = a + row;
            a.recorder().output("y", s.rms_norm(w, 1e-6) * s);
        },
        "is read elsewhere",
    );
    refused(
        |a, b, _, w| {
            let s = a + b;
            let first = s.silu();
            a.recorder().output("y", s.rms_norm(w, 1e-6) * first);
        },
        "before its norm",
    );
    refused(|a, b, _, w| a.recorder().output("y", (a + b.silu()).rms_norm(w, 1e-6)), "is a pointwise op");
    assert_eq!(run(|a, b, _, _| a.recorder().output("y", (a + b).rms_norm_plain(1e-6))), (1, String::new()));
    refused(|a, b, _, _| a.recorder().output("y", (a + b.matmul(b.t()).matmul(b)).rms_norm_plain(1e-6)), "is a matmul");
    refused(|a, _, row, _| a.recorder().output("y", (a + row).rms_norm_plain(1e-6)), "is broadcast or of another type");
    refused(|a, b, _, w| a.recorder().output("y", (a + b.slice(1, 0, 1)).rms_norm(w, 1e-6)), "and no single row");
    refused(
        |a, b, _, w| {
            let s = a + b;
            let loss = s.rms_norm(w, 1e-6).square().sum();
            a.recorder().output("ds", a.recorder().grad(loss, &[s])[0]);
        },
        "a gradient with respect to the sum",
    );
}

#[test]
fn norms_around_a_residual_connection_are_one_where_their_eps_is_the_same() {
    let applied = |[branch, sum, next]: [f32; 3]| {
        let record = |r: &Recorder| {
            let state = |name: &str| r.state(name, &[6, 8], DType::F32, Init::Full(1.0));
            let s = (state("x") + state("o").layer_norm(branch)).layer_norm(sum);
            r.output("y", s.layer_norm(next) * s);
        };
        compiled("fuse-norm", Switches::default(), record).0
    };
    assert_eq!([[1e-5, 1e-5, 1e-5], [1e-3, 1e-5, 1e-5], [1e-5, 1e-3, 1e-5]].map(applied), [1, 0, 0]);
}

#[test]
fn fused_norms_keep_rows_weights_and_tables_in_f32() {
    let half = || Switches::default().with("bf16", "auto").unwrap();
    let pass = |name: &str| *PASSES.iter().find(|p| p.name() == name).unwrap();
    let (applied, _, ops) = compiled("fuse-norm", half(), |r| pass("fuse-norm").example(r));
    assert_eq!(applied, 4);
    assert!(ops.contains(&"add_rms_norm [bf16[70, 24], bf16[70, 24]]".into()), "{ops:?}");
    assert!(ops.contains(&"residual_norm [bf16[70, 24], bf16[70, 24]]".into()), "{ops:?}");
    assert!(ops.contains(&"add_rms_norm [bf16[70, 24], bf16[70, 24], f32[24]]".into()), "{ops:?}");
    assert!(ops.contains(&"add_rms_norm [bf16[70, 24], f32[1, 24], f32[24]]".into()), "{ops:?}");
    let (applied, _, ops) = compiled("fuse-qk-norm", half(), |r| pass("fuse-qk-norm").example(r));
    assert_eq!(applied, 3);
    assert!(ops.contains(&"norm_rope [bf16[2, 17, 3, 8], f32[17, 4], f32[17, 4], f32[1]]".into()), "{ops:?}");
    assert!(!ops.iter().any(|o| o.starts_with("rms_norm")), "{ops:?}");
}

/// A mixture of experts in bf16 with gradients, compiled for a GPU: `grouped-gemm`' receipt, and the ops with their inputs' types.
fn experts(sm: u32, hidden: usize, bf16: &str, gradients: bool) -> (Receipt, Vec<(String, Vec<DType>, usize)>) {
    let r = Recorder::new();
    let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.2 });
    let (gate_up, down) = (param("gate_up", &[4, 2 * hidden, 16]), param("down", &[4, 16, hidden]));
    let (y, routing) = mixture(r.feed("x", &[40, 16], DType::F32), Some(param("router", &[4, 16])), gate_up, down, 2);
    let loss = y.square().mean() + routing.unwrap().balance() * 0.01;
    r.output("loss", loss);
    if gradients {
        r.output("dw", r.grad(loss, &[gate_up])[0]);
    }
    let target = Target::Cuda(Arch { sm, multiprocessors: 132 });
    let c = kiln_engine::Compiled::new(r.finish(), &Switches::default().with("bf16", bf16).unwrap(), target).unwrap();
    let types = |i: usize| c.graph.inputs(i).iter().map(|m| m.dtype).collect();
    let ops = c.graph.nodes.iter().enumerate().map(|(i, n)| (n.name().to_string(), types(i), n.outputs.len())).collect();
    (c.receipts.iter().find(|r| r.pass == "grouped-gemm").unwrap().clone(), ops)
}

#[test]
fn experts_run_on_tensor_cores_or_there_is_a_reason() {
    let declined = |sm, hidden, bf16| {
        let (receipt, _) = experts(sm, hidden, bf16, true);
        (receipt.applied, receipt.declined.first().map_or(String::new(), |d| d.0.clone()))
    };
    assert_eq!(declined(90, 24, "auto"), (4, String::new()));
    assert_eq!(declined(80, 24, "auto"), (4, String::new()));
    let refused = |(applied, reason): (usize, String), why: &str| assert!(applied == 0 && reason.contains(why), "{applied} {reason}");
    refused(declined(90, 24, "off"), "the tensor-core kernels take bf16 and f16");
    refused(declined(75, 24, "auto"), "compute capability 8.0");
    refused(declined(90, 23, "auto"), "a row of 23 elements");
}

#[test]
fn routing_stays_f32_and_experts_keep_only_what_a_gradient_reads() {
    let find = |gradients, name: &str| experts(90, 24, "auto", gradients).1.into_iter().find(|op| op.0 == name).unwrap();
    assert_eq!(find(true, "route").1, [DType::F32]);
    let (half, int) = (DType::BF16, DType::I32);
    assert_eq!(find(true, "grouped_swiglu").1, [half, half, int, int, int, DType::F32]);
    assert_eq!((find(true, "grouped_swiglu").2, find(false, "grouped_swiglu").2), (2, 1));
    assert_eq!(find(true, "grouped_outer").1, [half, half, int, int]);
}

#[test]
fn what_is_typed_keeps_its_types_under_bf16() {
    let r = Recorder::new();
    let w = r.param("w", &[8, 8], Init::Normal { std: 1.0 });
    let x = r.feed("x", &[6, 8], DType::F32);
    let (h, exact) = (x.matmul(w), r.typed(|| x.matmul(w).softmax()));
    let (narrow, wide) = (h.silu(), r.typed(|| h.softmax().matmul(w)));
    [("narrow", narrow), ("wide", wide), ("exact", exact)].into_iter().for_each(|(name, v)| r.output(name, v));
    let c = kiln_engine::Compiled::new(r.finish(), &Switches::default().with("bf16", "require").unwrap(), Target::Cpu).unwrap();
    let types: Vec<(&str, DType)> = c.graph.outputs.iter().map(|(name, v)| (name.as_str(), c.graph.meta(*v).dtype)).collect();
    assert_eq!(types, [("narrow", DType::BF16), ("wide", DType::F32), ("exact", DType::F32)]);
    let products = (0..c.graph.nodes.len()).filter(|&i| c.graph.nodes[i].name() == "matmul");
    let inputs: Vec<DType> = products.map(|i| c.graph.inputs(i)[0].dtype).collect();
    assert_eq!(inputs, [DType::BF16, DType::F32, DType::F32]);
}

/// A gate with dropout behind it, as Vision-BDH has it, its loss and its gradients.
fn gated(r: &Recorder) {
    let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.5 });
    let params = [param("encoder", &[16, 72]), param("gate", &[3, 16, 24]), param("decoder", &[72, 16])];
    let (x, y) = (r.feed("x", &[2, 5, 16], DType::F32), r.feed("y", &[3, 10, 16], DType::F32));
    let out = r.block("layer", || {
        let open = x.matmul(params[0]).relu().reshape(&[2, 5, 3, 24]);
        let gate = y.matmul(params[1]).reshape(&[3, 2, 5, 24]).permute(&[1, 2, 0, 3]);
        open.gated(gate, Some((0.2, r.feed("rng", &[4], DType::I32)))).reshape(&[2, 5, 72]).matmul(params[2])
    });
    let loss = out.square().mean();
    r.output("loss", loss);
    for (i, g) in r.grad(loss, &params).into_iter().enumerate() {
        r.output(&format!("g{i}"), g);
    }
}

/// The graph as a GPU gets it, and what a pass did.
pub fn for_gpu(pass: &str, switches: &Switches, record: impl Fn(&Recorder)) -> (Graph, Receipt) {
    let r = Recorder::new();
    record(&r);
    let arch = Arch { sm: 90, multiprocessors: 132 };
    let c = kiln_engine::Compiled::new(r.finish(), switches, Target::Cuda(arch)).unwrap();
    let receipt = c.receipts.iter().find(|r| r.pass == pass).unwrap().clone();
    (c.graph, receipt)
}

/// Its outputs, on the CPU.
fn outputs(graph: Graph) -> Vec<Vec<f32>> {
    let feeds: Vec<(String, check::Numbers)> = graph
        .feeds()
        .map(|(name, meta)| {
            let kind = if name == "rng" { Fill::Rng } else { Fill::Normal };
            (name.to_string(), check::fill(kind, name.len() as u64, meta.elements()))
        })
        .collect();
    let names: Vec<String> = graph.outputs.iter().map(|o| o.0.clone()).collect();
    let mut store = Store::new(3);
    let mut p = Program::load(graph, &Switches::default(), &Device::cpu(Cpu::new(2)), &mut store).unwrap();
    let given: Vec<(&str, Data)> = feeds.iter().map(|(n, d)| (n.as_str(), d.data())).collect();
    p.run(&mut store, &given).unwrap();
    names.iter().map(|n| p.read(n, &store).unwrap()).collect()
}

#[test]
fn products_take_in_the_arithmetic_behind_them() {
    let half = Switches::default().with("bf16", "auto").unwrap();
    fn example(r: &Recorder) {
        PASSES.iter().find(|p| p.name() == "gemm-pointwise").unwrap().example(r);
    }
    for (record, switches, sites, dtype) in
        [(gated as fn(&Recorder), &half, 2, DType::BF16), (example, &Switches::default(), 1, DType::F32)]
    {
        let (on, receipt) = for_gpu("gemm-pointwise", switches, record);
        assert_eq!((receipt.applied, on.nodes.iter().filter(|n| n.name() == "matmul_pointwise").count()), (sites, sites));
        let (off, _) = for_gpu("gemm-pointwise", &switches.clone().with("gemm-pointwise", "off").unwrap(), record);
        for (a, b) in outputs(on).iter().zip(outputs(off)) {
            let error = check::relative(a, &b);
            assert!(error < check::tolerance(dtype, 16), "{error}");
        }
    }
    // Nothing of the gate is kept but its result: the gradient reads that and what was gated.
    let (on, _) = for_gpu("gemm-pointwise", &half, gated);
    let backward = on.nodes.iter().find(|n| n.backward && n.name() == "matmul_pointwise").unwrap();
    assert_eq!((backward.inputs.len(), backward.outputs.len()), (4, 2));
}

#[test]
fn products_keep_to_themselves_where_that_is_better() {
    let refused = |record: fn(Var, Var, Var), why: &str| {
        let (graph, receipt) = for_gpu("gemm-pointwise", &Switches::default(), |r| {
            let half = |name: &str, shape: &[usize]| r.state(name, shape, DType::BF16, Init::Full(1.0));
            record(half("a", &[2, 24, 16]), half("b", &[2, 16, 24]), half("c", &[2, 24, 24]));
        });
        assert!(graph.nodes.iter().all(|n| n.name() != "matmul_pointwise"));
        let reasons: Vec<&str> = receipt.declined.iter().map(|d| d.0.as_str()).collect();
        assert!(if why.is_empty() { reasons.is_empty() } else { reasons.iter().any(|r| r.contains(why)) }, "{reasons:?}");
    };
    refused(|a, b, c| a.recorder().output("y", a.matmul(b).tanh() * c.slice(1, 0, 1)), "is broadcast or strided");
    refused(|a, b, c| a.recorder().output("y", a.matmul(b).t().tanh() * c), "broadcast, sliced or transposed");
    refused(|a, b, _| a.recorder().output("y", a.t().matmul(b.t()).tanh()), "not row-major");
    refused(|a, b, c| a.recorder().output("y", a.slice(2, 1, 9).matmul(b.slice(1, 0, 8)).tanh() * c), "multiples of 16 bytes");
    refused(|a, b, c| a.recorder().output("y", a.slice(2, 0, 7).matmul(b.slice(1, 0, 7)).tanh() * c), "multiples of 8");
    refused(
        |a, b, _| {
            let product = a.matmul(b);
            a.recorder().output("y", product.tanh());
            a.recorder().output("product", product);
        },
        "",
    );
    refused(
        |a, _, c| {
            let long = a.reshape(&[768]).expand(&[24, 768]);
            a.recorder().output("y", long.matmul(long.t()).tanh() * c.slice(0, 0, 1).reshape(&[24, 24]));
        },
        "K = 768",
    );
}

/// What is computed twice is counted, so that without it a program's arithmetic is that of the same program without recompute.
#[test]
fn added_arithmetic_is_what_recompute_adds() {
    let flops = |value: &str| {
        let r = Recorder::new();
        let x = r.feed("x", &[8, 16], DType::F32);
        let params = ["a", "b"].map(|name| r.param(name, &[16, 16], Init::Normal { std: 0.2 }));
        fn block<'g>(x: Var<'g>, w: Var<'g>) -> Var<'g> {
            x + x.linear(w).silu()
        }
        let y = r.block("blocks.0", || block(x, params[0]));
        let loss = r.block("blocks.1", || block(y, params[1])).square().mean();
        r.grad(loss, &params).into_iter().zip(params).for_each(|(g, p)| r.update(p, p - g));
        r.output("loss", loss);
        let c = kiln_engine::Compiled::new(r.finish(), &Switches::default().with("recompute", value).unwrap(), Target::Cpu).unwrap();
        (c.plan.cost.flops, c.receipts.iter().map(|r| r.added_flops).sum::<u64>())
    };
    let ((plain, none), (twice, added)) = (flops("off"), flops("auto,what=blocks"));
    assert!(none == 0 && added > plain / 10, "{added} of {plain}");
    assert!((twice - added).abs_diff(plain) * 100 < plain, "{twice} - {added} is {plain}");
}

/// Of a step that adds up two losses, `hoist` puts the whole backward pass of one before the forward pass of the other.
#[test]
fn recompute_reaches_the_backward_passes_of_two_losses() {
    fn graph() -> Graph {
        let r = Recorder::new();
        let weights: Vec<Var> = (0..6).map(|i| r.param(&format!("w{i}"), &[16, 16], Init::Normal { std: 0.3 })).collect();
        let loss = |x: &str| {
            let mut h = r.feed(x, &[512, 16], DType::F32);
            for (i, w) in weights.iter().enumerate() {
                h = r.block(&format!("{x}.{i}"), || h + h.silu().matmul(*w).swiglu(h.matmul(*w)).matmul(*w));
            }
            h.square().mean()
        };
        let loss = loss("a") + loss("b");
        r.output("loss", loss);
        r.grad(loss, &weights).into_iter().enumerate().for_each(|(i, g)| r.output(&format!("dw{i}"), g));
        r.finish()
    }
    let compile = |recompute: &str| {
        // Weight gradients that are one matmul for both losses would keep what they read.
        let switches = Switches::default().with("recompute", recompute).unwrap().with("merged-wgrad", "off").unwrap();
        kiln_engine::Compiled::new(graph(), &switches, Target::Cpu).unwrap()
    };
    let run = |recompute: &str| {
        let mut store = Store::new(5);
        let mut p = Program::from_compiled(compile(recompute), &Device::cpu(Cpu::new(1)), &mut store).unwrap();
        let x: Vec<f32> = (0..512 * 16).map(|i| (i % 37) as f32 / 37.0 - 0.5).collect();
        let y: Vec<f32> = x.iter().map(|x| x * 0.5 + 0.1).collect();
        p.run(&mut store, &[("a", Data::F32(&x)), ("b", Data::F32(&y))]).unwrap();
        let names = std::iter::once("loss".to_string()).chain((0..6).map(|i| format!("dw{i}")));
        names.map(|n| p.read(&n, &store).unwrap()).collect::<Vec<_>>()
    };
    let [off, bound, blocks] = ["off", "auto,what=memory-bound", "auto,what=blocks"].map(|how| compile(how).plan.memory.activations);
    assert!(bound * 4 < off * 3 && blocks * 2 < off, "off {off}, memory-bound {bound}, blocks {blocks}");
    let whole = run("off");
    assert!(whole[0][0] > 0.0);
    assert_eq!(run("auto,what=memory-bound"), whole);
    assert_eq!(run("auto,what=blocks"), whole);
}

#[test]
fn an_unreached_parameter_is_an_error_by_name() {
    let r = Recorder::new();
    let (a, b) = (r.param("used", &[2], Init::Full(1.0)), r.param("forgotten", &[2], Init::Full(1.0)));
    let loss = a.sum();
    r.output("g", r.grad(loss, &[a, b])[1]);
    let e = kiln_engine::Compiled::new(r.finish(), &Switches::default(), Target::Cpu).err().unwrap();
    assert!(e.to_string().contains("'forgotten'"), "{e}");
}

#[test]
#[should_panic(expected = "matmul of f32[2, 3] and f32[4, 5]")]
fn shapes_that_do_not_fit_panic_where_they_are_recorded() {
    let r = Recorder::new();
    let x = r.feed("x", &[2, 3], DType::F32);
    x.matmul(r.feed("y", &[4, 5], DType::F32));
}

#[test]
fn attention_without_softmax_becomes_one_op_where_it_fits() {
    const HEADS: &[usize] = &[0, 2, 1, 3];
    let run = |pairs: Pairs, values: &[usize], more: fn(&Recorder, Var, Var)| {
        let (applied, declined, _) = compiled("linear-attention", Switches::default(), |r| {
            let state = |name: &str, shape: &[usize]| r.state(name, shape, DType::F32, Init::Full(1.0));
            let q = state("xs", &[2, 5, 3, 8]).rope(pairs, r.rope_tables(5, 8, 100.0)).permute(HEADS);
            let s = q.matmul(q.t());
            let y = s.matmul(state("v", values));
            more(r, s, y);
        });
        (applied, declined.join(", "))
    };
    let plain: fn(&Recorder, Var, Var) = |r, _, y| r.output("y", y);
    assert_eq!(run(Pairs::Adjacent, &[2, 1, 5, 4], plain), (1, String::new()));
    assert_eq!(run(Pairs::Adjacent, &[2, 1, 5, 4], |r, _, y| r.output("y", y.layer_norm(1e-5))), (1, String::new()));
    let refused = |(applied, declined): (usize, String), why: &str| assert!(applied == 0 && declined.contains(why), "{applied} {declined}");
    refused(run(Pairs::Halves, &[2, 1, 5, 4], plain), "not adjacent");
    refused(run(Pairs::Adjacent, &[2, 3, 5, 4], plain), "values of its own");
    refused(
        run(Pairs::Adjacent, &[2, 1, 5, 4], |r, s, y| {
            r.output("s", s);
            r.output("y", y);
        }),
        "read elsewhere",
    );
}

#[test]
fn linear_attention_takes_in_what_its_gradient_meets() {
    let r = Recorder::new();
    PASSES.iter().find(|p| p.name() == "linear-attention").unwrap().example(&r);
    let c = kiln_engine::Compiled::new(r.finish(), &Switches::default().with("bf16", "auto").unwrap(), Target::Cpu).unwrap();
    let grad = c.graph.nodes.iter().find_map(|n| n.op::<LinearAttentionGrad>()).unwrap();
    assert!(grad.norm && grad.add && grad.relu, "{grad:?}");
    let i = c.graph.nodes.iter().position(|n| n.name() == "linear_attention").unwrap();
    let types: Vec<DType> = c.graph.inputs(i).iter().map(|m| m.dtype).collect();
    assert_eq!(types, [DType::BF16, DType::F32, DType::F32, DType::BF16]);
}

/// Attention whose heads are longer than any kernel takes is written out on a GPU, in every type and direction.
#[test]
fn attention_of_long_heads_is_declined_on_a_gpu_and_written_out() {
    fn record(r: &Recorder, head: usize) {
        let w = r.param("w", &[head, 3 * head], Init::Normal { std: 0.05 });
        let qkv = r.feed("x", &[1, 5, head], DType::F32).matmul(w).reshape(&[1, 5, 3, 1, head]);
        let part = |i: usize| qkv.slice(2, i, i + 1).reshape(&[1, 5, 1, head]);
        let y = kiln_engine::ops::attention::attention(part(0), part(1), part(2), true, 0.05);
        let loss = y.square().mean();
        r.output("y", y);
        r.output("dw", r.grad(loss, &[w])[0]);
    }
    let compiled = |head: usize, target: Target, bf16: &str| {
        let r = Recorder::new();
        record(&r, head);
        let c = kiln_engine::Compiled::new(r.finish(), &Switches::default().with("bf16", bf16).unwrap(), target).unwrap();
        let fused = c.graph.nodes.iter().any(|n| n.name() == "flash_attention");
        (c.receipts.into_iter().find(|r| r.pass == "flash-attention").unwrap(), fused)
    };
    for (sm, bf16) in [(80, "off"), (90, "auto"), (120, "auto")] {
        let gpu = Target::Cuda(Arch { sm, multiprocessors: 132 });
        for head in [385, 512, 1000] {
            let (receipt, fused) = compiled(head, gpu, bf16);
            assert_eq!(receipt.declined, [(format!("head dimension {head}: the GPU kernels take up to 384"), "the top level".to_string())]);
            assert!(!fused && receipt.applied == 0);
        }
        // Every other size has a kernel, whatever it is a multiple of.
        for head in [1, 2, 3, 7, 12, 16, 20, 33, 64, 100, 128, 129, 257, 383, 384] {
            assert!(compiled(head, gpu, bf16).1, "{head}");
        }
    }
    assert!(compiled(512, Target::Cpu, "off").1, "the CPU's code takes any");
    // What is written out computes the same.
    let run = |flash: &str| {
        let r = Recorder::new();
        record(&r, 512);
        let mut store = Store::new(3);
        let switches = Switches::default().with("flash-attention", flash).unwrap();
        let mut p = Program::load(r.finish(), &switches, &Device::cpu(Cpu::new(2)), &mut store).unwrap();
        p.run(&mut store, &[("x", check::fill(Fill::Normal, 5, 5 * 512).data())]).unwrap();
        ["y", "dw"].map(|name| p.read(name, &store).unwrap())
    };
    let errors: Vec<f64> = run("require").iter().zip(&run("off")).map(|(a, b)| check::relative(a, b)).collect();
    assert!(errors.iter().all(|e| *e < 1e-5), "{errors:?}");
}

#[test]
fn heads_are_normed_and_turned_in_one_go_only_where_nothing_is_lost() {
    let run = |more: for<'g> fn(Var<'g>, Var<'g>, Var<'g>) -> Var<'g>| {
        let numbers = |mode: &str| {
            let r = Recorder::new();
            let x = r.feed("x", &[2, 5, 3, 8], DType::F32);
            let (w, number) = (r.param("w", &[8], Init::Normal { std: 1.0 }), r.param("number", &[1], Init::Full(1.5)));
            r.output("y", more(x, w, number).rope(Pairs::Halves, r.rope_tables(5, 8, 100.0)));
            let mut store = Store::new(3);
            let switches = Switches::default().with("fuse-qk-norm", mode).unwrap();
            let mut p = Program::load(r.finish(), &switches, &Device::cpu(Cpu::new(2)), &mut store).unwrap();
            p.run(&mut store, &[("x", check::fill(Fill::Normal, 5, 240).data())]).unwrap();
            let receipt = p.receipts.iter().find(|r| r.pass == "fuse-qk-norm").unwrap();
            (receipt.declined.first().map_or(String::new(), |d| d.0.clone()), p.read("y", &store).unwrap())
        };
        let ((reason, on), (_, off)) = (numbers("auto"), numbers("off"));
        assert!(check::relative(&on, &off) < 1e-6, "{reason}");
        reason
    };
    assert_eq!(run(|x, w, _| x.rms_norm(w, 1e-6)), "");
    assert_eq!(run(|x, _, number| x.rms_norm_plain(1e-6) * number), "");
    assert_eq!(run(|x, w, number| x.rms_norm(w, 1e-6) * number), "the norm has a weight and is also multiplied by a number");
    let twice = run(|x, w, _| {
        let normed = x.rms_norm(w, 1e-6);
        x.recorder().output("normed", normed);
        normed
    });
    assert_eq!(twice, "the normed heads are read elsewhere");
}

/// A pass of another crate that does nothing.
struct Foreign(&'static str, Stage, &'static [&'static str]);

impl Switch for Foreign {
    fn name(&self) -> &'static str {
        self.0
    }
    fn about(&self) -> &'static str {
        "nothing"
    }
    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Exact
    }
    fn example(&self, _: &Recorder) {}
}

impl Pass for Foreign {
    fn stage(&self) -> Stage {
        self.1
    }
    fn after(&self) -> &'static [&'static str] {
        self.2
    }
    fn apply(&self, _: &mut Graph, _: &Settings, _: &mut Receipt) -> Result<(), Error> {
        Ok(())
    }
}

#[test]
fn a_foreign_pass_is_refused_where_it_cannot_run() {
    static LATE: Extension = Extension { ops: &[], passes: &[&Foreign("late", Stage::Fused, &["layout"])] };
    static UNKNOWN: Extension = Extension { ops: &[], passes: &[&Foreign("lost", Stage::Fused, &["nowhere"])] };
    static TAKEN: Extension = Extension { ops: &[], passes: &[&Foreign("cse", Stage::Fused, &[])] };
    for (extension, parts) in [(&LATE, ["'layout'", "'late'"]), (&UNKNOWN, ["'nowhere'", "'lost'"]), (&TAKEN, ["'cse'", "already"])] {
        let said = kiln_engine::register(extension).unwrap_err().to_string();
        assert!(parts.iter().all(|p| said.contains(p)), "{said}");
    }
    assert!(all().all(|p| !["late", "lost"].contains(&p.name())));
}
