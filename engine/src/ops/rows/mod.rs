//! Rows of a table by index: gather, scatter-add, replace. For embeddings, routing and caches.

use crate::cpu::{View, ViewMut, simd};
use crate::graph::Kind;
use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, Meta};
use crate::op::{Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share};
use crate::ops::collective::vocabulary;
use crate::ops::full::Full;
use crate::ops::reduce::packs::{PACKS, pack};
use crate::ranks::Group;
use crate::record::Var;
use rayon::prelude::*;
use std::sync::Arc;

/// y`[i]` = table[index`[i]`]. Inputs: table [rows, d], index i32 [..]. Output [.., d].
#[derive(Debug)]
pub struct GatherRows {
    /// Whether the indices are distinct, so that the gradient need not sort them.
    pub once: bool,
    /// Rows and indices are in so many groups of equal size, one for each sequence of a batch; an index counts from the first row of its group. With more than one, they are
    /// distinct.
    pub groups: usize,
}

/// The row that each index names, counted from the first of all.
fn absolute(index: &[i32], rows: usize, groups: usize) -> impl Fn(usize) -> i32 {
    let (each, step) = ((index.len() / groups).max(1), (rows / groups) as i32);
    move |i| index[i] + (i / each) as i32 * step
}

/// Whether rows and indices are in groups of equal size.
fn grouped(rows: usize, index: &Meta, groups: usize) -> bool {
    groups == 1 || rows.is_multiple_of(groups) && index.shape[0] == groups
}

impl Op for GatherRows {
    fn name(&self) -> &'static str {
        "gather_rows"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert!(x[0].rank() == 2 && x[0].dtype.is_float() && x[1].dtype == DType::I32, "gather_rows of {x:?}");
        assert!(grouped(x[0].dim(1), &x[1], self.groups) && (self.once || self.groups == 1), "{self:?} of {x:?}");
        vec![x[0].with(&[&x[1].shape[..], &[x[0].dim(0)]].concat())]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let d = x[0].dim(0);
        let (table, row) = (x[0].f32(), absolute(x[1].i32(), x[0].dim(1), self.groups));
        y[0].f32().par_chunks_mut(d).with_min_len(32).enumerate().for_each(|(i, out)| {
            out.copy_from_slice(&table[row(i) as usize * d..][..d]);
        });
    }

    fn precision(&self, at: Port, x: &[Meta]) -> Narrow {
        // Rows are cast after they are gathered, so that the table's gradient accumulates in f32.
        match at {
            Port::In(_) => crate::mutant!("embedding-gradient-summed-in-bf16", Narrow::Keep, Narrow::Round),
            Port::Out(_) if x[0].dim(0) > 1 => Narrow::Round,
            Port::Out(_) => Narrow::Follow(vec![0]),
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        let (d, n, dtype) = (io.x[0].dim(0), io.x[1].elements(), io.x[0].dtype);
        let vec = pack(&[dtype], &[d]);
        Launch::new(&[PACKS, include_str!("gather.cu")].concat(), "gather")
            .define_type("T", dtype)
            .define("VEC", vec)
            .define("D", d)
            .define("N", n)
            .define("ROWS", io.x[0].dim(1) / self.groups)
            .define("EACH", n / self.groups)
            .grid((n * (d / vec)).div_ceil(256), 1, 1)
            .all(io)
            .code()
    }

    /// Columns of the table; indices, or, of groups, those with their rows.
    fn axes(&self, x: &[Meta], parts: usize) -> Vec<Axis> {
        let mut axes = vec![Axis::new([Share::Dim(1), Share::Whole], [Share::Dim(x[1].rank())])];
        match self.groups {
            1 => axes.extend((0..x[1].rank()).map(|d| Axis::new([Share::Whole, Share::Dim(d)], [Share::Dim(d)]))),
            n if n.is_multiple_of(parts) => axes.push(Axis::new([Share::Dim(0), Share::Dim(0)], [Share::Dim(0)])),
            _ => {}
        }
        axes
    }

    fn part(&self, _: &[Meta], axis: usize, parts: usize, _: usize) -> Option<Arc<dyn Op>> {
        (self.groups > 1 && axis == 1).then(|| Arc::new(GatherRows { groups: self.groups / parts, ..*self }) as _)
    }

    /// Each rank has some of the table's rows.
    fn is_divided(&self, x: &[Meta], have: &[Share], parts: usize) -> bool {
        self.groups == 1 && have == [Share::Dim(0), Share::Whole] && vocabulary::is_numbered(x[0].dim(1), parts)
    }

    fn divided<'g>(&self, x: &[Var<'g>], _: &[Share], group: &Group) -> Option<Vec<Var<'g>>> {
        Some(vec![vocabulary::gather_rows(x[0], x[1], group)])
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let write = if self.once { Write::AddOnce } else { Write::Add };
        let back = |d: Var<'g>| d.recorder().op1(ScatterRows { write, groups: self.groups }, &[d.recorder().full_like(x[0]), x[1], d]);
        vec![dy[0].map(back), None]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(2 * self.infer(x)[0].bytes() + x[1].bytes())
    }
}

/// What happens to a row that an index names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Write {
    /// The source row is added to it.
    Add,
    /// As `Add`, where the caller promises distinct indices, which need not be sorted.
    AddOnce,
    /// The source row replaces it; of equal indices, the last one wins.
    Replace,
}

/// Up to so many indices, every thread looks at all of them; more are sorted by row first.
const FEW: usize = 256;

/// y = base, with source`[i]` added to row index`[i]`, or replacing it. Inputs: base [rows, d], index i32 [..], source [.., d].
#[derive(Debug)]
pub struct ScatterRows {
    /// Whether rows are added or replaced.
    pub write: Write,
    /// As of [`GatherRows`].
    pub groups: usize,
}

impl Op for ScatterRows {
    fn name(&self) -> &'static str {
        "scatter_rows"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let fits = x[0].rank() == 2 && x[1].dtype == DType::I32 && x[2].rows() == x[1].elements() && x[2].dim(0) == x[0].dim(0);
        assert!(fits && x[0].dtype == x[2].dtype, "scatter_rows of {x:?}");
        assert!(grouped(x[0].dim(1), &x[1], self.groups) && (self.write == Write::AddOnce || self.groups == 1), "{self:?} of {x:?}");
        vec![x[0].clone()]
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let d = x[2].dim(0);
        let (index, source) = (x[1].i32(), x[2].f32());
        let row = absolute(index, y[0].dim(1), self.groups);
        let rows: Vec<i32> = if self.groups > 1 { (0..index.len()).map(row).collect() } else { vec![] };
        let index = if self.groups > 1 { &rows } else { index };
        if self.write == Write::AddOnce {
            debug_assert!(distinct(index, y[0].dim(1)), "scatter_add_rows_once: an index occurs twice");
        }
        by_row(
            y[0].f32(),
            d,
            index,
            #[inline(always)]
            |i, row| {
                let source = &source[i * d..][..d];
                match self.write {
                    Write::Add | Write::AddOnce => row.iter_mut().zip(source).for_each(|(o, &s)| *o += s),
                    Write::Replace => row.copy_from_slice(source),
                }
            },
        );
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        match at {
            Port::In(0 | 1) => Narrow::Keep,
            _ => Narrow::Follow(vec![0]),
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        let (d, rows, n, dtype) = (io.y[0].dim(0), io.y[0].dim(1), io.x[1].elements(), io.y[0].dtype);
        let vec = pack(&[dtype], &[d]);
        let (index, source, y) = (At::X(1).into(), At::X(2).into(), At::Y(0).into());
        let packs = d / vec;
        let launch = |text: &str, entry: &'static str, items: usize, args: &[Place]| {
            Launch::new(&[PACKS, text].concat(), entry)
                .define_type("T", dtype)
                .define("VEC", vec)
                .define("D", d)
                .define("N", n)
                .define("ROWS", rows)
                .grid((items * packs).div_ceil(256), 1, 1)
                .args(args)
        };
        if self.write == Write::AddOnce {
            let launch = launch(include_str!("add_once.cu"), "add_once", n, &[index, source, y]);
            return launch.define("GROUP", rows / self.groups).define("EACH", n / self.groups).code();
        }
        let add = self.write == Write::Add;
        if n <= FEW {
            return launch(include_str!("scatter_few.cu"), "scatter_few", n, &[index, source, y]).define("ADD", add as u8).code();
        }

        // Segments short enough to keep the GPU busy, but not so short that their partial sums take much memory.
        let segment = ((n * packs) >> 18).next_power_of_two().clamp(4, 32);
        let segments = n.div_ceil(segment);
        // Workspace: total, hits [n], sorted [n], head [segments, d], tail [segments, d].
        let round = |bytes: usize| bytes.next_multiple_of(256);
        let hits = 256;
        let sorted = hits + round(8 * n);
        let head = sorted + round(8 * n);
        let tail = head + round(4 * segments * d);
        let [total, hits, sorted, head, tail] = [0, hits, sorted, head, tail].map(|at| At::Work.plus(at));

        const THREADS: usize = 1024;
        let range = rows.div_ceil(128).min(THREADS);
        let sort = Launch::new(include_str!("sort.cu"), "sort_rows")
            .define("N", n)
            .define("ROWS", rows)
            .define("RANGE", range)
            .define("THREADS", THREADS)
            .define("EACH", 8)
            .grid(rows.div_ceil(range), 1, 1)
            .block(THREADS)
            .args(&[index, total, hits, sorted]);
        let scatter = |entry, items, args: &[Place]| {
            let launch = launch(include_str!("scatter.cu"), entry, items, args);
            Step::Launch(launch.define("SEGMENT", segment).define("BATCH", 4))
        };
        let mut steps = vec![Step::Launch(sort)];
        if add {
            steps.push(scatter("add", segments, &[total, sorted, source, y, head, tail]));
            steps.push(scatter("add_long", segments, &[total, sorted, y, head, tail]));
        } else {
            steps.push(scatter("replace", n, &[total, sorted, source, y]));
        }
        Code { steps, workspace: if add { tail.bytes + 4 * segments * d } else { head.bytes } }
    }

    /// Columns; groups of rows with their indices and sources.
    fn axes(&self, x: &[Meta], parts: usize) -> Vec<Axis> {
        let last = Share::Dim(x[2].rank() - 1);
        let mut axes = vec![Axis::new([Share::Dim(1), Share::Whole, last], [Share::Dim(1)])];
        axes.extend((self.groups > 1 && self.groups.is_multiple_of(parts)).then(|| Axis::first(&[true; 3], 1)));
        axes
    }

    fn part(&self, _: &[Meta], axis: usize, parts: usize, _: usize) -> Option<Arc<dyn Op>> {
        (axis == 1).then(|| Arc::new(ScatterRows { groups: self.groups / parts, ..*self }) as _)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0] else { return vec![None; 3] };
        let rows = d.recorder().op1(GatherRows { once: self.write == Write::AddOnce, groups: self.groups }, &[d, x[1]]);
        let source = rows.reshape(&x[2].shape());
        let base = match self.write {
            Write::Add | Write::AddOnce => d,
            // Correct only for distinct indices; caches, its only users, are never differentiated.
            Write::Replace => {
                d.recorder().op1(ScatterRows { write: Write::Replace, groups: 1 }, &[d, x[1], d.recorder().full_like(source)])
            }
        };
        vec![Some(base), None, Some(source)]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(3 * x[2].bytes() + x[1].bytes())
    }

    fn accumulate<'g>(&self, x: &[Var<'g>], _: usize, into: Var<'g>) -> Option<Var<'g>> {
        let empty = x[0].recorder().with_graph(|g| match &g.nodes[x[0].value().node].kind {
            Kind::Op(op) => op.is::<Full>().is_some_and(|f| f.value == 0.0),
            _ => false,
        });
        let (write, groups) = (self.write, self.groups);
        (empty && write != Write::Replace).then(|| into.recorder().op1(ScatterRows { write, groups }, &[into, x[1], x[2]]))
    }
}

/// Calls `f` with every i and row index[i] of y [rows, d], if that exists. Each task owns a range of rows and goes through all indices in order:
/// no races, and additions to a row happen in the order of the indices.
fn by_row(y: &mut [f32], d: usize, index: &[i32], f: impl Fn(usize, &mut [f32]) + Sync) {
    let range = (y.len() / d).div_ceil(4 * rayon::current_num_threads()).max(1);
    y.par_chunks_mut(range * d).enumerate().for_each(|(task, out)| {
        simd(
            #[inline(always)]
            || {
                let first = task * range;
                let own = first..first + out.len() / d;
                for (i, &row) in index.iter().enumerate().filter(|(_, r)| own.contains(&(**r as usize))) {
                    f(i, &mut out[(row as usize - first) * d..][..d]);
                }
            },
        )
    });
}

/// Whether no index inside the table occurs twice.
fn distinct(index: &[i32], rows: usize) -> bool {
    let mut seen = vec![false; rows];
    index.iter().filter_map(|&i| seen.get_mut(i as usize).map(|s| std::mem::replace(s, true))).all(|twice| !twice)
}

impl crate::record::Recorder {
    /// Zeros of the same shape and type.
    fn full_like<'g>(&'g self, v: Var<'g>) -> Var<'g> {
        self.op1(Full { shape: v.shape(), value: 0.0, dtype: v.dtype() }, &[])
    }
}

impl<'g> Var<'g> {
    /// Rows of this table [rows, d], as in `torch.embedding`: [.., d]. All indices must be inside the table.
    #[track_caller]
    pub fn gather_rows(self, index: Var<'g>) -> Var<'g> {
        self.recorder().op1(GatherRows { once: false, groups: 1 }, &[self, index])
    }

    /// As `gather_rows`, where the caller promises distinct indices, which makes the gradient faster.
    #[track_caller]
    pub fn gather_rows_once(self, index: Var<'g>) -> Var<'g> {
        self.recorder().op1(GatherRows { once: true, groups: 1 }, &[self, index])
    }

    /// This table has rows for each sequence of a batch, [sequences * rows, d]; of each sequence, those that its indices [sequences, k] name, counted from the sequence's
    /// first row, none twice: [sequences * k, d].
    #[track_caller]
    pub fn gather_rows_by_sequence(self, index: Var<'g>) -> Var<'g> {
        let (groups, d) = (index.shape()[0], self.dim(0));
        let rows = self.recorder().op1(GatherRows { once: true, groups }, &[self, index]);
        rows.reshape(&[index.meta().elements(), d])
    }

    /// Adds the rows of `source` [sequences * k, d] to those rows of this table that `gather_rows_by_sequence` takes with these indices [sequences, k].
    #[track_caller]
    pub fn scatter_add_rows_by_sequence(self, index: Var<'g>, source: Var<'g>) -> Var<'g> {
        self.recorder().op1(ScatterRows { write: Write::AddOnce, groups: index.shape()[0] }, &[self, index, source])
    }

    /// Adds row i of `source` to row `index[i]` of this table; indices outside of it are skipped.
    #[track_caller]
    pub fn scatter_add_rows(self, index: Var<'g>, source: Var<'g>) -> Var<'g> {
        self.recorder().op1(ScatterRows { write: Write::Add, groups: 1 }, &[self, index, source])
    }

    /// As `scatter_add_rows`, where the caller promises distinct indices; of equal ones, some sources would be lost.
    #[track_caller]
    pub fn scatter_add_rows_once(self, index: Var<'g>, source: Var<'g>) -> Var<'g> {
        self.recorder().op1(ScatterRows { write: Write::AddOnce, groups: 1 }, &[self, index, source])
    }

    /// Replaces row `index[i]` by row i of `source`; of equal indices, the last one wins. Its gradient is correct only for distinct indices.
    #[track_caller]
    pub fn replace_rows(self, index: Var<'g>, source: Var<'g>) -> Var<'g> {
        self.recorder().op1(ScatterRows { write: Write::Replace, groups: 1 }, &[self, index, source])
    }
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("gather, some twice", &[In(&[7, 5], Fill::Normal), In(&[3, 4], Fill::Index(7))], |x| vec![x[0].gather_rows(x[1])]),
    Case::new("add, some twice", &[In(&[7, 5], Fill::Normal), In(&[12], Fill::Index(7)), In(&[12, 5], Fill::Normal)], |x| {
        vec![x[0].scatter_add_rows(x[1], x[2])]
    }),
    Case::new("add, sorted first", &[In(&[50, 5], Fill::Normal), In(&[700], Fill::Index(50)), In(&[700, 5], Fill::Normal)], |x| {
        vec![x[0].scatter_add_rows(x[1], x[2])]
    }),
    Case::new("add to a gather's gradient", &[In(&[9, 4], Fill::Normal), In(&[5], Fill::Index(9))], |x| {
        vec![x[0].scatter_add_rows(x[1], x[0].gather_rows(x[1]).silu())]
    }),
    Case::new("gather, none twice", &[In(&[9, 8], Fill::Normal), In(&[2, 3], Fill::Rows(9))], |x| vec![x[0].gather_rows_once(x[1])]),
    Case::new("add, none twice", &[In(&[700, 5], Fill::Normal), In(&[300], Fill::Rows(700)), In(&[300, 5], Fill::Normal)], |x| {
        vec![x[0].scatter_add_rows_once(x[1], x[2])]
    }),
    Case::new("gather by sequence", &[In(&[3, 9], Fill::Distinct), In(&[27, 8], Fill::Normal)], |x| {
        vec![x[1].gather_rows_by_sequence(x[0].top_k(4)).silu()]
    }),
    Case::new("add by sequence", &[In(&[3, 9], Fill::Distinct), In(&[27, 5], Fill::Normal), In(&[12, 5], Fill::Normal)], |x| {
        vec![x[1].scatter_add_rows_by_sequence(x[0].top_k(4), x[2])]
    }),
    Case::new("mark", &[In(&[40, 1], Fill::Normal), In(&[33], Fill::Rows(40)), In(&[33, 1], Fill::Normal)], |x| {
        vec![x[0].scatter_add_rows_once(x[1], x[2])]
    }),
    Case::new("add once to a gather's gradient", &[In(&[9, 4], Fill::Normal), In(&[5], Fill::Rows(9))], |x| {
        vec![x[0].scatter_add_rows_once(x[1], x[0].gather_rows_once(x[1]).silu())]
    }),
    Case::new("replace", &[In(&[7, 5], Fill::Normal), In(&[1], Fill::Index(7)), In(&[1, 5], Fill::Normal)], |x| {
        vec![x[0].replace_rows(x[1], x[2])]
    }),
    Case::new("embedding", &[In(&[50304, 768], Fill::Normal), In(&[64, 1024], Fill::Index(50304))], |x| vec![x[0].gather_rows(x[1])])
        .bench(),
    Case::new("routing", &[In(&[65536, 768], Fill::Normal), In(&[32768], Fill::Rows(65536)), In(&[32768, 768], Fill::Normal)], |x| {
        vec![x[0].scatter_add_rows_once(x[1], x[2])]
    })
    .bench(),
];

#[cfg(test)]
mod tests {
    use super::distinct;

    #[test]
    fn rows_named_twice_are_found() {
        assert!(distinct(&[3, 0, 2], 4));
        assert!(!distinct(&[3, 0, 3], 4));
        assert!(distinct(&[-1, 7, -1, 7], 4)); // outside: skipped
    }
}
