//! Trees of arrays: a structure of parameters is flattened to a list of arrays, and rebuilt from
//! such a list. This file computes nothing.

use std::collections::BTreeMap;

use crate::array::Array;
use crate::error::{Error, ErrorKind, Result};

/// A value made of arrays (its leaves) in a fixed order, such as the named parameters of a model.
///
/// Implemented for [`Array`], `()`, `Vec`, arrays `[T; N]`, `Option`, `Box`, tuples of up to four,
/// and [`BTreeMap`] in the order of its keys. For your own structure, list the leaves in a fixed
/// order, and rebuild the structure in the same order:
///
/// ```
/// use mlx_rs_core::{Array, transforms::Tree};
///
/// struct Linear { weight: Array, bias: Option<Array> }
///
/// impl Tree for Linear {
///     fn visit<'a>(&'a self, leaves: &mut Vec<&'a Array>) {
///         self.weight.visit(leaves);
///         self.bias.visit(leaves);
///     }
///     fn rebuild(&self, leaves: &mut dyn Iterator<Item = Array>) -> Option<Self> {
///         Some(Self { weight: self.weight.rebuild(leaves)?, bias: self.bias.rebuild(leaves)? })
///     }
/// }
/// # fn main() -> mlx_rs_core::Result<()> {
/// let layer = Linear { weight: Array::vector(&[1.0f32])?, bias: None };
/// assert_eq!(layer.leaves().len(), 1);
/// # Ok(()) }
/// ```
pub trait Tree: Sized {
    /// Appends the leaves, in order.
    fn visit<'a>(&'a self, leaves: &mut Vec<&'a Array>);

    /// The same structure with other leaves, which the iterator returns in the order of
    /// [`visit`](Tree::visit). `None` if there are too few.
    fn rebuild(&self, leaves: &mut dyn Iterator<Item = Array>) -> Option<Self>;

    /// The leaves, in order.
    fn leaves(&self) -> Vec<&Array> {
        let mut leaves = Vec::new();
        self.visit(&mut leaves);
        leaves
    }

    /// The same structure with other leaves; `op` names the operation in an error.
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when the number of leaves differs.
    fn with_leaves(&self, op: &'static str, leaves: Vec<Array>) -> Result<Self> {
        let (given, expected) = (leaves.len(), self.leaves().len());
        let mut leaves = leaves.into_iter();
        match self.rebuild(&mut leaves) {
            Some(tree) if given == expected && leaves.next().is_none() => Ok(tree),
            _ => Err(Error::new(
                ErrorKind::Value,
                op,
                format!("a tree has {expected} leaves, but {given} arrays were given"),
            )),
        }
    }

    /// A tree of the same structure with `f` applied to each leaf.
    ///
    /// ```
    /// use mlx_rs_core::{Array, transforms::Tree};
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let pair = vec![Array::scalar(1.0f32)?, Array::scalar(2.0f32)?];
    /// let squares = pair.map_leaves(|a| a.square())?;
    /// assert_eq!(squares[1].item::<f32>()?, 4.0);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Errors of `f`.
    fn map_leaves(&self, f: impl FnMut(&Array) -> Result<Array>) -> Result<Self> {
        let leaves = self.leaves().into_iter().map(f).collect::<Result<_>>()?;
        self.with_leaves("map_leaves", leaves)
    }

    /// Returns a tree of the same structure. Each leaf is the result of `f` for a leaf of this tree
    /// and the corresponding leaf of `other`, for example a parameter and its gradient.
    ///
    /// ```
    /// use mlx_rs_core::{Array, transforms::Tree};
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let (weights, grads) = ([Array::scalar(1.0f32)?], [Array::scalar(0.5f32)?]);
    /// let next = weights.zip_leaves(&grads, |w, g| w.subtract(g))?;
    /// assert_eq!(next[0].item::<f32>()?, 0.5);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when the numbers of leaves differ; errors of `f`.
    fn zip_leaves(
        &self,
        other: &Self,
        mut f: impl FnMut(&Array, &Array) -> Result<Array>,
    ) -> Result<Self> {
        let (a, b) = (self.leaves(), other.leaves());
        if a.len() != b.len() {
            return Err(Error::new(
                ErrorKind::Value,
                "zip_leaves",
                format!("trees of {} and {} leaves do not pair", a.len(), b.len()),
            ));
        }
        let leaves = a
            .into_iter()
            .zip(b)
            .map(|(a, b)| f(a, b))
            .collect::<Result<_>>()?;
        self.with_leaves("zip_leaves", leaves)
    }
}

impl Tree for Array {
    fn visit<'a>(&'a self, leaves: &mut Vec<&'a Array>) {
        leaves.push(self);
    }
    fn rebuild(&self, leaves: &mut dyn Iterator<Item = Array>) -> Option<Self> {
        leaves.next()
    }
}

impl Tree for () {
    fn visit<'a>(&'a self, _leaves: &mut Vec<&'a Array>) {}
    fn rebuild(&self, _leaves: &mut dyn Iterator<Item = Array>) -> Option<Self> {
        Some(())
    }
}

impl<T: Tree> Tree for Box<T> {
    fn visit<'a>(&'a self, leaves: &mut Vec<&'a Array>) {
        (**self).visit(leaves);
    }
    fn rebuild(&self, leaves: &mut dyn Iterator<Item = Array>) -> Option<Self> {
        (**self).rebuild(leaves).map(Box::new)
    }
}

impl<T: Tree> Tree for Option<T> {
    fn visit<'a>(&'a self, leaves: &mut Vec<&'a Array>) {
        if let Some(tree) = self {
            tree.visit(leaves);
        }
    }
    fn rebuild(&self, leaves: &mut dyn Iterator<Item = Array>) -> Option<Self> {
        match self {
            Some(tree) => tree.rebuild(leaves).map(Some),
            None => Some(None),
        }
    }
}

impl<T: Tree> Tree for Vec<T> {
    fn visit<'a>(&'a self, leaves: &mut Vec<&'a Array>) {
        for tree in self {
            tree.visit(leaves);
        }
    }
    fn rebuild(&self, leaves: &mut dyn Iterator<Item = Array>) -> Option<Self> {
        self.iter().map(|tree| tree.rebuild(leaves)).collect()
    }
}

impl<T: Tree, const N: usize> Tree for [T; N] {
    fn visit<'a>(&'a self, leaves: &mut Vec<&'a Array>) {
        for tree in self {
            tree.visit(leaves);
        }
    }
    fn rebuild(&self, leaves: &mut dyn Iterator<Item = Array>) -> Option<Self> {
        let trees: Option<Vec<T>> = self.iter().map(|tree| tree.rebuild(leaves)).collect();
        trees?.try_into().ok()
    }
}

impl<K: Ord + Clone, T: Tree> Tree for BTreeMap<K, T> {
    fn visit<'a>(&'a self, leaves: &mut Vec<&'a Array>) {
        for tree in self.values() {
            tree.visit(leaves);
        }
    }
    fn rebuild(&self, leaves: &mut dyn Iterator<Item = Array>) -> Option<Self> {
        self.iter()
            .map(|(key, tree)| Some((key.clone(), tree.rebuild(leaves)?)))
            .collect()
    }
}

macro_rules! tuples {
    ($(($($name:ident . $i:tt),+);)*) => {$(
        impl<$($name: Tree),+> Tree for ($($name,)+) {
            fn visit<'a>(&'a self, leaves: &mut Vec<&'a Array>) {
                $(self.$i.visit(leaves);)+
            }
            fn rebuild(&self, leaves: &mut dyn Iterator<Item = Array>) -> Option<Self> {
                Some(($(self.$i.rebuild(leaves)?,)+))
            }
        }
    )*};
}

tuples! {
    (A.0);
    (A.0, B.1);
    (A.0, B.1, C.2);
    (A.0, B.1, C.2, D.3);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_keep_their_places() {
        let a = |v: f32| Array::scalar(v).unwrap();
        let tree = (
            BTreeMap::from([("b", vec![a(2.0), a(3.0)]), ("a", vec![a(1.0)])]),
            Some([a(4.0)]),
            (),
            Box::new((None::<Array>, a(5.0))),
        );
        let values: Vec<f32> = tree.leaves().iter().map(|l| l.item().unwrap()).collect();
        assert_eq!(values, [1.0, 2.0, 3.0, 4.0, 5.0]);
        let negated = tree.map_leaves(Array::negative).unwrap();
        assert_eq!(negated.0["b"][1].item::<f32>().unwrap(), -3.0);
        assert_eq!(negated.3.1.item::<f32>().unwrap(), -5.0);
        let zero = tree.zip_leaves(&negated, Array::add).unwrap();
        assert!(
            zero.leaves()
                .iter()
                .all(|l| l.item::<f32>().unwrap() == 0.0)
        );
    }

    #[test]
    fn a_wrong_number_of_leaves_is_an_error() {
        let a = |v: f32| Array::scalar(v).unwrap();
        let tree = vec![a(1.0), a(2.0)];
        for n in [0, 1, 3] {
            let e = tree
                .with_leaves("t", (0..n).map(|_| a(0.0)).collect())
                .unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Value, "{n}");
        }
        assert!(
            tree.zip_leaves(&vec![a(1.0)], |x, _| Ok(x.clone()))
                .is_err()
        );
    }
}
