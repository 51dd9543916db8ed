//! Views, which run nothing: reshape, permute, slice, expand, stop_gradient.

use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io};
use crate::meta::{Layout, Meta, broadcast_strides};
use crate::op::{self, Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share};
use crate::record::Var;
use std::sync::Arc;

/// What all views have in common: they run nothing. `$precision` says what mixed precision may round.
macro_rules! view_op {
    ($name:literal) => {
        view_op!($name, op::rounded);
    };
    ($name:literal, $precision:path) => {
        fn name(&self) -> &'static str {
            $name
        }
        fn cpu(&self, _: &[View], _: &mut [ViewMut], _: &mut [f32]) {
            unreachable!("a view is resolved by the plan")
        }
        fn cuda(&self, _: &Io) -> Code {
            unreachable!("a view is resolved by the plan")
        }
        fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
            $precision(at)
        }
        fn cost(&self, _: &[Meta]) -> Cost {
            Cost::memory(0)
        }
        fn layout(&self, _: usize) -> Layout {
            Layout::Any
        }
        fn is_view(&self) -> bool {
            true
        }
    };
}

pub(in crate::ops) use view_op;

/// The same elements in another shape.
#[derive(Debug)]
pub struct Reshape(pub Vec<usize>);

impl Op for Reshape {
    view_op!("reshape");

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert_eq!(x[0].elements(), self.0.iter().product::<usize>(), "reshape {:?} to {:?}", x[0], self.0);
        vec![x[0].with(&self.0)]
    }

    /// Dimensions that are joined or cut are divided where both sides have the same outermost one.
    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        let leading = |shape: &[usize]| -> Vec<(usize, usize)> {
            // Of each dimension, how many elements are before it, and which it is; dimensions of size 1 are not divided.
            let before = |d: usize| shape[..d].iter().product::<usize>();
            (0..shape.len()).filter(|&d| shape[d] > 1).map(|d| (before(d), d)).collect()
        };
        let new = leading(&self.0);
        let pairs = leading(&x[0].shape).into_iter().filter_map(|(before, d)| Some((d, new.iter().find(|n| n.0 == before)?.1)));
        pairs.map(|(from, to)| Axis::new([Share::Dim(from)], [Share::Dim(to)])).collect()
    }

    fn part(&self, x: &[Meta], axis: usize, parts: usize, _: usize) -> Option<Arc<dyn Op>> {
        let Share::Dim(to) = self.axes(x, parts)[axis].y[0] else { unreachable!("a reshape divides a dimension") };
        let mut shape = self.0.clone();
        shape[to] /= parts;
        Some(Arc::new(Reshape(shape)))
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        vec![dy[0].map(|d| d.reshape(&x[0].shape()))]
    }

    fn alias(&self, x: &Meta, strides: &[usize]) -> Option<(usize, Vec<usize>)> {
        // From the left, old dimensions are grouped until they have as many elements as the new ones so far; a group can be split differently only
        // if it is contiguous.
        let (old, new) = (&x.shape, &self.0);
        let mut out = vec![0; new.len()];
        let (mut i, mut j) = (0, 0);
        while j < new.len() {
            let (i0, j0) = (i, j);
            let (mut a, mut b) = (1, 1);
            loop {
                if a < b || (i == i0 && i < old.len()) {
                    a *= *old.get(i)?;
                    i += 1;
                } else if b < a || j == j0 {
                    b *= *new.get(j)?;
                    j += 1;
                } else {
                    break;
                }
            }
            // Dimensions of size 1 fit into any group.
            while i < old.len() && old[i] == 1 {
                i += 1;
            }
            while j < new.len() && new[j] == 1 {
                j += 1;
            }
            let group: Vec<usize> = (i0..i).filter(|&d| old[d] != 1).collect();
            if group.windows(2).any(|w| strides[w[0]] != strides[w[1]] * old[w[1]]) {
                return None;
            }
            let mut step = group.last().map_or(1, |&d| strides[d]);
            for d in (j0..j).rev() {
                out[d] = step;
                step *= new[d];
            }
        }
        Some((0, out))
    }
}

/// The dimensions in another order: output dimension i is input dimension `.0[i]`.
#[derive(Debug)]
pub struct Permute(pub Vec<usize>);

impl Op for Permute {
    view_op!("permute");

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let mut seen = self.0.clone();
        seen.sort();
        assert!(seen == (0..x[0].rank()).collect::<Vec<_>>(), "permute {:?} by {:?}", x[0], self.0);
        vec![x[0].with(&self.0.iter().map(|&d| x[0].shape[d]).collect::<Vec<_>>())]
    }

    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        (0..x[0].rank()).map(|to| Axis::new([Share::Dim(self.0[to])], [Share::Dim(to)])).collect()
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let mut back = vec![0; self.0.len()];
        for (to, &from) in self.0.iter().enumerate() {
            back[from] = to;
        }
        vec![dy[0].map(|d| d.permute(&back))]
    }

    fn alias(&self, _: &Meta, strides: &[usize]) -> Option<(usize, Vec<usize>)> {
        Some((0, self.0.iter().map(|&d| strides[d]).collect()))
    }
}

/// Part of one dimension.
#[derive(Debug)]
pub struct Slice {
    /// Which dimension.
    pub axis: usize,
    /// The first index.
    pub start: usize,
    /// The index after the last.
    pub end: usize,
}

impl Slice {
    /// Into how many equal sections the dimension is cut, if this is one of them and there are others.
    pub fn sections(&self, x: &Meta) -> Option<usize> {
        let (all, own) = (x.shape[self.axis], self.end - self.start);
        (own < all && all.is_multiple_of(own) && self.start.is_multiple_of(own)).then_some(all / own)
    }
}

impl Op for Slice {
    view_op!("slice");

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let (a, s, e) = (self.axis, self.start, self.end);
        assert!(a < x[0].rank() && s < e && e <= x[0].shape[a], "slice {s}..{e} of axis {a} of {:?}", x[0]);
        let mut shape = x[0].shape.clone();
        shape[a] = e - s;
        vec![x[0].with(&shape)]
    }

    /// The other dimensions; and its own, where it is one of equal sections and a rank has a part of each.
    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        let others = (0..x[0].rank()).filter(|&d| d != self.axis).map(|d| Axis::new([Share::Dim(d)], [Share::Dim(d)]));
        let sections = self.sections(&x[0]).map(|n| Axis::new([Share::Sections(self.axis, n)], [Share::Dim(self.axis)]));
        others.chain(sections).collect()
    }

    fn part(&self, x: &[Meta], axis: usize, parts: usize, _: usize) -> Option<Arc<dyn Op>> {
        let own = axis + 1 == x[0].rank();
        own.then(|| Arc::new(Slice { axis: self.axis, start: self.start / parts, end: self.end / parts }) as Arc<dyn Op>)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        vec![dy[0].map(|d| d.pad(self.axis, self.start, x[0].shape()[self.axis] - self.end))]
    }

    fn alias(&self, _: &Meta, strides: &[usize]) -> Option<(usize, Vec<usize>)> {
        Some((self.start * strides[self.axis], strides.to_vec()))
    }
}

/// Broadcasts dimensions of size 1 to this shape.
#[derive(Debug)]
pub struct Expand(pub Vec<usize>);

impl Op for Expand {
    view_op!("expand");

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let fits = crate::meta::broadcast(&[&x[0].shape, &self.0]).is_some_and(|s| s == self.0);
        assert!(fits, "expand {:?} to {:?}", x[0], self.0);
        vec![x[0].with(&self.0)]
    }

    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        let axis = |to: usize| {
            let own = (to + x[0].rank()).checked_sub(self.0.len()).filter(|&own| x[0].shape[own] == self.0[to]);
            Axis::new([own.map_or(Share::Whole, Share::Dim)], [Share::Dim(to)])
        };
        (0..self.0.len()).map(axis).collect()
    }

    fn part(&self, _: &[Meta], axis: usize, parts: usize, _: usize) -> Option<Arc<dyn Op>> {
        let mut shape = self.0.clone();
        shape[axis] /= parts;
        Some(Arc::new(Expand(shape)))
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        vec![dy[0].map(|d| d.sum_to(&x[0].shape()))]
    }

    fn alias(&self, x: &Meta, strides: &[usize]) -> Option<(usize, Vec<usize>)> {
        Some((0, broadcast_strides(&x.shape, strides, &self.0)))
    }
}

/// The same value, without a gradient: `detach` in PyTorch.
#[derive(Debug)]
pub struct StopGradient;

impl Op for StopGradient {
    view_op!("stop_gradient");

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        vec![x[0].clone()]
    }

    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        (0..x[0].rank()).map(|d| Axis::new([Share::Dim(d)], [Share::Dim(d)])).collect()
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        vec![None] // its purpose
    }

    fn alias(&self, _: &Meta, strides: &[usize]) -> Option<(usize, Vec<usize>)> {
        Some((0, strides.to_vec()))
    }
}

impl<'g> Var<'g> {
    /// The same elements in another shape of as many elements.
    #[track_caller]
    pub fn reshape(self, shape: &[usize]) -> Var<'g> {
        if self.shape() == shape {
            return self;
        }
        self.recorder().op1(Reshape(shape.to_vec()), &[self])
    }

    /// Output dimension i is input dimension `order[i]`. Undoing an earlier permutation gives its input.
    #[track_caller]
    pub fn permute(self, order: &[usize]) -> Var<'g> {
        let back = self.recorder().with_graph(|g| {
            let node = &g.nodes[self.value().node];
            let undone = |p: &&Permute| p.0.len() == order.len() && order.iter().enumerate().all(|(i, &o)| p.0[o] == i);
            node.op::<Permute>().filter(undone).map(|_| node.inputs[0])
        });
        match back {
            Some(v) => self.recorder().var(v),
            None => self.recorder().op1(Permute(order.to_vec()), &[self]),
        }
    }

    /// The transpose: swaps the last two dimensions.
    #[track_caller]
    pub fn t(self) -> Var<'g> {
        let rank = self.meta().rank();
        assert!(rank >= 2, "the transpose of {self:?}");
        let mut order: Vec<usize> = (0..rank).collect();
        order.swap(rank - 1, rank - 2);
        self.permute(&order)
    }

    /// The elements `start..end` of a dimension.
    #[track_caller]
    pub fn slice(self, axis: usize, start: usize, end: usize) -> Var<'g> {
        if self.shape().get(axis) == Some(&end) && start == 0 {
            return self;
        }
        self.recorder().op1(Slice { axis, start, end }, &[self])
    }

    /// Element `i` of the first dimension, without that dimension.
    #[track_caller]
    pub fn row(self, i: usize) -> Var<'g> {
        self.slice(0, i, i + 1).reshape(&self.shape()[1..])
    }

    /// Broadcasts to a shape: expands dimensions of size 1, and adds leading dimensions.
    #[track_caller]
    pub fn expand(self, shape: &[usize]) -> Var<'g> {
        if self.shape() == shape {
            return self;
        }
        self.recorder().op1(Expand(shape.to_vec()), &[self])
    }

    /// The same value without a gradient: `detach` in PyTorch.
    pub fn stop_gradient(self) -> Var<'g> {
        self.recorder().op1(StopGradient, &[self])
    }
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("reshape of a permuted", &[In(&[2, 3, 4], Fill::Normal)], |x| vec![x[0].permute(&[2, 0, 1]).reshape(&[8, 3]) * 2.0]),
    Case::new("slices", &[In(&[5, 6], Fill::Normal)], |x| vec![x[0].slice(0, 1, 4).slice(1, 2, 6) * x[0].slice(0, 2, 5).slice(1, 0, 4)]),
    Case::new("expand", &[In(&[3, 1], Fill::Normal), In(&[2, 3, 4], Fill::Normal)], |x| vec![x[0].expand(&[2, 3, 4]) * x[1]]),
    Case::new("stop_gradient", &[In(&[7], Fill::Normal), In(&[7], Fill::Frozen)], |x| vec![x[0] * x[1].stop_gradient()]),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::contiguous;

    #[test]
    fn reshapes_that_need_no_copy() {
        let alias = |from: &[usize], strides: &[usize], to: &[usize]| Reshape(to.to_vec()).alias(&Meta::f32(from), strides).map(|a| a.1);
        assert_eq!(alias(&[2, 3, 4], &contiguous(&[2, 3, 4]), &[6, 2, 2]), Some(vec![4, 2, 1]));
        // rows of a wider tensor: the rows cannot join, but each can be cut
        assert_eq!(alias(&[5, 6], &[10, 1], &[5, 2, 3]), Some(vec![10, 3, 1]));
        assert_eq!(alias(&[5, 6], &[10, 1], &[30]), None);
        assert_eq!(alias(&[2, 3], &[1, 2], &[3, 2]), None);
        assert_eq!(alias(&[1, 4], &[9, 2], &[4, 1, 1]).map(|s| s[0]), Some(2));
        assert_eq!(alias(&[4], &[0], &[2, 2]), Some(vec![0, 0]));
    }
}
