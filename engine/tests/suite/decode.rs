//! What a decoder launches for one token, and that fusing it changes nothing.

use crate::passes::for_gpu;
use kiln_engine::ops::cache::decode_attention;
use kiln_engine::ops::rope::Pairs;
use kiln_engine::{Cpu, DType, Data, Device, Init, Program, Recorder, Store, Switches, Var, check};

/// One token of each of three sequences through a decoder's layers; with an adapter on q, if `lora`.
pub fn decoder<'g>(r: &'g Recorder, layers: usize, lora: bool) {
    let frozen = |name: &str, shape: &[usize]| r.frozen(name, shape, Init::Normal { std: 0.2 });
    let norm = |x: Var<'g>, name: &str| x.rms_norm(frozen(name, &[x.dim(0)]), 1e-6);
    let (past, ids) = (r.state("past", &[1], DType::I32, Init::Full(2.0)), r.feed("ids", &[3, 1], DType::I32));
    let (cos, sin) = r.rope_tables(9, 8, 100.0);
    let tables = r.typed(|| (cos.gather_rows(ids), sin.gather_rows(ids)));
    let embedding = frozen("embedding", &[50, 16]);
    let mut x = embedding.gather_rows(ids);
    for layer in 0..layers {
        let name = |part: &str| format!("layers.{layer}.{part}");
        let linear = |x: Var<'g>, part: &str, n: usize| x.linear(frozen(&name(part), &[n, x.dim(0)]));
        let turned = |y: Var<'g>, heads: usize, part: &str| norm(y.reshape(&[3, 1, heads, 8]), &name(part)).rope(Pairs::Halves, tables);
        let cache = |part: &str| r.state(&name(part), &[3, 9, 2, 8], DType::F32, Init::Full(0.0));
        x = r.block(&format!("layers.{layer}"), || {
            let h = norm(x, &name("first"));
            let [q, k, v] = [("q", 32), ("k", 16), ("v", 16)].map(|(part, n)| linear(h, part, n));
            let q = if lora { q + linear(linear(h, "a", 8) * 0.5, "b", 32) } else { q };
            let (q, k) = (turned(q, 4, "q_norm"), turned(k, 2, "k_norm"));
            let caches = (cache("keys"), cache("values"));
            let (a, new) = decode_attention(q, k, v.reshape(&[3, 1, 2, 8]), caches, past, None, 0.35);
            r.update(caches.0, new.0);
            r.update(caches.1, new.1);
            let x = x + linear(a.reshape(&[3, 1, 32]), "o", 16);
            let h = norm(x, &name("second"));
            x + linear(linear(h, "gate", 40).swiglu(linear(h, "up", 40)), "down", 16)
        });
    }
    r.output("logits", norm(x, "last").linear(embedding));
}

#[test]
fn a_token_is_few_launches() {
    let half = Switches::default().with("bf16", "auto").unwrap();
    let launched = |switches: &Switches, layers: usize, lora: bool| {
        let (g, receipt) = for_gpu("fuse-decode", switches, |r| decoder(r, layers, lora));
        let names: Vec<&str> = g.nodes.iter().filter(|n| !n.is_source() && !n.is_view()).map(|n| n.name()).collect();
        (names.join(" "), receipt)
    };
    let (names, receipt) = launched(&half, 1, false);
    assert_eq!((receipt.applied, receipt.declined.len()), (9, 0), "eight matmuls and attention");
    let layer = "few_rows decode_attention few_rows few_rows few_rows";
    assert_eq!(names, format!("gather_rows gather_rows gather_rows {layer} few_rows"));
    // The adapter's first product is made with q, k and v; the second adds the rest.
    let (names, receipt) = launched(&half, 2, true);
    assert_eq!((receipt.applied, receipt.declined.len()), (21, 0));
    let layer = "few_rows pointwise few_rows decode_attention few_rows few_rows few_rows";
    assert_eq!(names, format!("gather_rows gather_rows gather_rows {layer} {layer} few_rows"));
    let (names, receipt) = launched(&Switches::default(), 1, false);
    assert!(receipt.applied == 1 && receipt.declined[0].0.contains("not f32") && !names.contains("few_rows"), "{names}");
    // The same numbers, but for rounding; and nothing is touched where gradients are asked for.
    let run = |mode: &str| {
        let r = Recorder::new();
        decoder(&r, 2, true);
        let mut store = Store::new(3);
        let switches = half.clone().with("fuse-decode", mode).unwrap();
        let mut p = Program::load(r.finish(), &switches, &Device::cpu(Cpu::new(2)), &mut store).unwrap();
        p.run(&mut store, &[("ids", Data::I32(&[7, 1, 3]))]).unwrap();
        p.read("logits", &store).unwrap()
    };
    let error = check::relative(&run("require"), &run("off"));
    assert!(error < check::tolerance(DType::BF16, 50), "{error}");
    let trained = |r: &Recorder| {
        let w = r.param("w", &[8, 8], Init::Full(1.0));
        let loss = r.feed("x", &[4, 8], DType::F32).linear(w).sum();
        r.output("g", r.grad(loss, &[w])[0]);
    };
    assert_eq!(for_gpu("fuse-decode", &half, trained).1.sites(), 0);
}

/// What an earlier program left in a state is a weight, unless this program changes it: its kernels ask for weights before what comes before them has ended.
#[test]
fn a_state_is_a_weight_only_where_it_stays_as_it_is() {
    let half = Switches::default().with("bf16", "auto").unwrap();
    let declined = |changes: bool| {
        let (_, receipt) = for_gpu("fuse-decode", &half, |r| {
            decoder(r, 1, false);
            let kept = r.state("kept", &[24, 16], DType::BF16, Init::Full(1.0));
            let x = r.frozen("more", &[50, 16], Init::Normal { std: 0.2 }).gather_rows(r.feed("ids", &[3, 1], DType::I32));
            r.output("y", x.reshape(&[3, 16]).cast(DType::BF16).linear(kept).cast(DType::F32));
            if changes {
                r.update(kept, (kept * 2.0).cast(DType::BF16));
            }
        });
        (receipt.applied, receipt.declined.iter().map(|d| d.0.clone()).collect::<Vec<_>>())
    };
    let (all, none) = declined(false);
    assert!(all == 10 && none.is_empty(), "{all}, {none:?}");
    assert_eq!(declined(true), (all - 1, vec!["the second operand is not a weight of the model".to_string()]));
}
