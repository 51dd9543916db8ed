//! What runs where the best way does not work: an op's older kernel for one that does not compile, single launches for a program that cannot be
//! captured. Each is an entry of a receipt, or an error where the mode is `require`.

use crate::error::Error;
use crate::graph::Graph;
use crate::kernel::{Arch, Code};
use crate::passes::Mode;

/// The executor settings that fall back.
pub const NATIVE: &str = "native-kernels";
pub const CAPTURE: &str = "cuda-graph";

/// Something that did not work and was replaced.
#[derive(Clone, Debug, PartialEq)]
pub struct Fallback {
    /// The setting that it was a site of.
    pub setting: &'static str,
    /// What did not work, and what runs instead.
    pub reason: String,
    /// Where in the model.
    pub site: String,
}

impl Fallback {
    /// An error where the setting is required.
    fn unless_required(self, mode: Mode) -> Result<Fallback, Error> {
        match mode {
            Mode::Require => Err(Error::Declined { pass: self.setting.into(), site: self.site, reason: self.reason }),
            _ => Ok(self),
        }
    }
}

/// A kernel to compile: its source, its name and the shared memory that it is launched with.
pub type Wanted = (String, &'static str, u32);

/// The code of every node with its kernels, and which of it is not the first choice.
#[derive(Debug)]
pub struct Kernels<K> {
    pub codes: Vec<Code>,
    /// One for each launch, in order.
    pub kernels: Vec<K>,
    pub fell_back: Vec<Fallback>,
}

/// Compiles kernels: each, or why it does not compile.
type Compile<'a, K> = &'a dyn Fn(&[Wanted]) -> Vec<Result<K, String>>;

/// Compiles the kernels of every node. Where one of them does not compile, the node's code for older GPUs is taken instead, the newest that does.
pub fn kernels<K>(g: &Graph, arch: Arch, mode: Mode, code: &dyn Fn(usize, Arch) -> Code, compile: Compile<K>) -> Result<Kernels<K>, Error> {
    let codes: Vec<Code> = (0..g.nodes.len()).map(|node| code(node, arch)).collect();
    let mut made = compile(&codes.iter().flat_map(wanted).collect::<Vec<_>>()).into_iter();
    let mut all = Kernels { codes: vec![], kernels: vec![], fell_back: vec![] };
    for (node, first) in codes.into_iter().enumerate() {
        let own: Result<Vec<K>, String> = made.by_ref().take(first.launches().count()).collect::<Vec<_>>().into_iter().collect();
        let (code, kernels) = match own {
            Ok(kernels) => (first, kernels),
            Err(log) => {
                let (op, scope) =
                    (g.nodes[node].name(), if g.nodes[node].scope.is_empty() { "the top level" } else { &*g.nodes[node].scope });
                let what = format!("the kernel of {op} does not compile ({})", problem(&log));
                let tried = &wanted(&first);
                let older = arch.older().filter(|_| mode != Mode::Off).map(|older| (older, code(node, older)));
                let mut others = older.filter(|(_, code)| wanted(code) != *tried);
                let found = others.find_map(|(older, code)| {
                    let kernels = compile(&wanted(&code)).into_iter().collect::<Result<Vec<K>, String>>().ok()?;
                    Some((older, code, kernels))
                });
                let name = |sm: u32| if sm == 0 { "any GPU".into() } else { format!("compute capability {}.{}", sm / 10, sm % 10) };
                let Some((older, code, kernels)) = found else {
                    return Err(Error::Cuda(format!("{what}, and there is none for older GPUs (in {scope}):\n{log}")));
                };
                let reason = format!("{what}: the one for {} runs instead", name(older.sm));
                all.fell_back.push(Fallback { setting: NATIVE, reason, site: scope.into() }.unless_required(mode)?);
                (code, kernels)
            }
        };
        all.codes.push(code);
        all.kernels.extend(kernels);
    }
    Ok(all)
}

/// The kernels that a node launches.
pub fn wanted(code: &Code) -> Vec<Wanted> {
    code.launches().map(|l| (l.text(), l.entry, l.shared)).collect()
}

/// A compiler's first complaint.
fn problem(log: &str) -> &str {
    log.lines().find(|l| l.contains("error")).or(log.lines().next()).unwrap_or("no message").trim()
}

/// What becomes of a program that could not be captured, and why.
pub fn uncaptured(mode: Mode, e: Error) -> Result<Fallback, Error> {
    let reason = format!("the program could not be captured ({e}): its kernels are launched one by one");
    Fallback { setting: CAPTURE, reason, site: "the whole program".into() }.unless_required(mode)
}

#[cfg(test)]
mod tests {
    use super::super::program::coder;
    use super::*;
    use crate::graph::Init;
    use crate::meta::DType;
    use crate::ops::attention::attention;
    use crate::passes::{Switches, Target};
    use crate::program::Compiled;
    use crate::record::Recorder;

    const HOPPER: Arch = Arch { sm: 90, multiprocessors: 132 };

    /// Causal attention and its gradient, in bf16, as a GPU gets it; and something that has one kernel only.
    fn compiled() -> Compiled {
        let r = Recorder::new();
        let w = r.param("w", &[64, 3 * 64], Init::Normal { std: 0.2 });
        let qkv = r.feed("x", &[2, 256, 64], DType::F32).matmul(w);
        let part = |i: usize| qkv.slice(2, 64 * i, 64 * (i + 1)).reshape(&[2, 256, 1, 64]);
        let loss = r.scope("layer", || attention(part(0), part(1), part(2), true, 0.125)).square().mean();
        r.output("loss", loss);
        r.output("dw", r.grad(loss, &[w])[0]);
        Compiled::new(r.finish(), &Switches::default().with("bf16", "auto").unwrap(), Target::Cuda(HOPPER)).unwrap()
    }

    /// With a compiler that refuses sources with one of these words in them; a kernel is its source.
    fn run(c: &Compiled, mode: Mode, refused: &[&str]) -> Result<Kernels<String>, Error> {
        let compile = |wanted: &[Wanted]| -> Vec<Result<String, String>> {
            let log = "a kernel does not compile for sm_90a:\nkernel.cu(7): error: planted\n1 error detected";
            wanted.iter().map(|w| if refused.iter().any(|r| w.0.contains(r)) { Err(log.into()) } else { Ok(w.0.clone()) }).collect()
        };
        kernels(&c.graph, HOPPER, mode, &coder(&c.graph, &c.plan.spots), &compile)
    }

    #[test]
    fn an_older_kernel_stands_in_for_one_that_does_not_compile() {
        let c = compiled();
        let of = |k: &Kernels<String>, op: &str| -> Vec<String> {
            let own = (0..c.graph.nodes.len()).filter(|&i| c.graph.nodes[i].name() == op);
            own.flat_map(|i| wanted(&k.codes[i])).map(|w| w.0).collect()
        };
        let whole = run(&c, Mode::Auto, &[]).unwrap();
        assert!(whole.fell_back.is_empty() && of(&whole, "flash_attention").iter().all(|t| t.contains("wgmma")));
        // wgmma is refused: forward and backward run with mma, everything else as before.
        let mma = run(&c, Mode::Auto, &["wgmma"]).unwrap();
        assert!(mma.kernels.iter().all(|t| !t.contains("wgmma")) && mma.kernels.len() >= whole.kernels.len());
        assert!(of(&mma, "flash_attention").iter().all(|t| t.contains("mma.sync")), "{:?}", of(&mma, "flash_attention"));
        let launched: usize = mma.codes.iter().map(|c| c.launches().count()).sum();
        assert_eq!(launched, mma.kernels.len());
        let said: Vec<&str> = mma.fell_back.iter().map(|f| f.reason.as_str()).collect();
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(
            said[0]
                == "the kernel of flash_attention does not compile (kernel.cu(7): error: planted): the one for compute capability 8.0 runs instead",
            "{said:?}"
        );
        assert_eq!((mma.fell_back[0].setting, mma.fell_back[0].site.as_str()), (NATIVE, "layer"));
        // Tensor cores are refused altogether.
        let plain = run(&c, Mode::Auto, &["wgmma", "mma.sync"]).unwrap();
        assert!(of(&plain, "flash_attention").iter().all(|t| !t.contains("mma.sync") && !t.contains("wgmma")));
        assert!(plain.fell_back[0].reason.ends_with("the one for any GPU runs instead"), "{:?}", plain.fell_back);
    }

    #[test]
    fn a_kernel_that_is_required_or_has_no_older_one_is_an_error() {
        let c = compiled();
        let error = |mode, refused: &[&str]| run(&c, mode, refused).unwrap_err().to_string();
        let required = error(Mode::Require, &["wgmma"]);
        assert!([NATIVE, "flash_attention", "planted", "layer"].iter().all(|part| required.contains(part)), "{required}");
        // Every text of attention is refused.
        let none = error(Mode::Auto, &["attention_forward"]);
        assert!(["flash_attention", "planted", "none for older GPUs", "layer"].iter().all(|part| none.contains(part)), "{none}");
        assert!(error(Mode::Off, &["wgmma"]).contains("flash_attention"));
    }

    #[test]
    fn capturing_is_an_error_only_where_it_is_required() {
        let failed = || Error::Cuda("capturing: operation not permitted".into());
        assert_eq!(uncaptured(Mode::Auto, failed()).unwrap().setting, CAPTURE);
        let said = uncaptured(Mode::Require, failed()).unwrap_err().to_string();
        assert!(said.contains(CAPTURE) && said.contains("operation not permitted"), "{said}");
    }
}
