//! Communication between processes: sums, gathers and messages between the members of a group. MLX
//! may be built with MPI, a ring of TCP connections, NCCL or others. `mpirun`, or `mlx.launch` with
//! its variables (`MLX_RANK`, `MLX_HOSTFILE`), starts the processes, and MLX connects them.
//!
//! A single process is a group of one, in which sums and gathers return their input.
//!
//! ```
//! use mlx_rs_core::{Array, distributed};
//! # fn main() -> mlx_rs_core::Result<()> {
//! let group = distributed::init(false)?;
//! let gradient = Array::vector(&[1.0f32, 2.0])?;
//! let summed = group.all_sum(&gradient)?;
//! if group.size() == 1 {
//!     assert_eq!(summed.to_vec::<f32>()?, [1.0, 2.0]);
//! }
//! # Ok(()) }
//! ```
//!
//! Every member must run the same operations in the same order. A member waits for the others in
//! [`crate::eval`], and holds this crate's lock while it waits.

#[cfg(any(target_os = "linux", target_os = "macos"))]
mod system;

use std::ffi::c_void;
use std::sync::OnceLock;

use mlx_sys as sys;

use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::memory;
use crate::{call, compat};

/// A group of processes. mlx-c cannot free a group, so a group exists until the program ends.
#[derive(Debug, Clone, Copy)]
pub struct Group {
    raw: sys::mlx_distributed_group,
}

// SAFETY: the handle is a pointer to a group that is never freed or changed. Every call that uses
// it holds the process-wide lock.
unsafe impl Send for Group {}
// SAFETY: see the note for `Send`.
unsafe impl Sync for Group {}

/// Whether this build of MLX supports communication between processes.
///
/// ```
/// use mlx_rs_core::distributed;
/// // Alone in a process, a program runs the same with and without.
/// println!("can reach other processes: {}", distributed::is_available());
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[doc(alias = "mlx_distributed_is_available")]
#[must_use]
pub fn is_available() -> bool {
    let Ok(_guard) = call::enter("distributed_is_available") else {
        return false;
    };
    // SAFETY: the call has no arguments and only queries.
    unsafe { compat::mlx_distributed_is_available() }
}

/// The group of all processes that were started together. A single process is a group of one,
/// unless `strict`. The first success is stored, and later calls return it.
///
/// ```
/// use mlx_rs_core::distributed;
/// let group = distributed::init(false)?;
/// assert!(group.rank() < group.size());
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// MLX's message when the other processes cannot be reached, or when `strict` and there are no
/// other processes.
#[doc(alias = "mlx_distributed_init")]
pub fn init(strict: bool) -> Result<Group> {
    static WORLD: OnceLock<Group> = OnceLock::new();
    let _guard = call::enter("distributed_init")?;
    if let Some(world) = WORLD.get().filter(|w| !strict || w.size() > 1) {
        return Ok(*world);
    }
    let group = Group::made("distributed_init", || {
        // SAFETY: the arguments are plain values. A null context means failure, and is checked.
        unsafe { compat::mlx_distributed_init(strict) }.ctx
    })?;
    Ok(*WORLD.get_or_init(|| group))
}

/// Ends MPI, if MPI connects the processes. A member calls this after its last operation: `mpirun`
/// treats a process that ends without this call as failed. Without MPI it does nothing.
///
/// ```
/// use mlx_rs_core::distributed;
/// let group = distributed::init(false)?;
/// println!("process {} of {}", group.rank(), group.size());
/// distributed::finalize();
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn finalize() {
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    {
        let _guard = call::lock();
        system::end_mpi();
    }
}

macro_rules! together {
    ($($(#[$doc:meta])* $name:ident = $c:ident;)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Errors
            /// MLX's message when the group does not support this type.
            pub fn $name(&self, a: &Array) -> Result<Array> {
                call::array(stringify!($name), |out, s| {
                    // SAFETY: all handles are live.
                    unsafe { sys::$c(out, a.raw(), self.raw, s) }
                })
                .map_err(|e| e.with_inputs(&[a]))
            }
        )*
    };
}

impl Group {
    fn made(op: &'static str, f: impl FnOnce() -> *mut c_void) -> Result<Self> {
        let ctx = call::handle(op, f)?;
        Ok(Self {
            raw: sys::mlx_distributed_group { ctx },
        })
    }

    /// The rank of this process in the group, from 0.
    ///
    /// ```
    /// use mlx_rs_core::distributed;
    /// assert!(distributed::init(false)?.rank() >= 0);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_distributed_group_rank")]
    #[must_use]
    pub fn rank(&self) -> i32 {
        let _guard = call::lock();
        // SAFETY: the handle is live.
        unsafe { sys::mlx_distributed_group_rank(self.raw) }
    }

    /// The number of processes in the group.
    ///
    /// ```
    /// use mlx_rs_core::distributed;
    /// assert!(distributed::init(false)?.size() >= 1);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_distributed_group_size")]
    #[must_use]
    pub fn size(&self) -> i32 {
        let _guard = call::lock();
        // SAFETY: the handle is live.
        unsafe { sys::mlx_distributed_group_size(self.raw) }
    }

    /// Splits the group. Processes that pass the same `color` form a subgroup, in the order of
    /// their `key`s. A negative `key` keeps the order of this group.
    ///
    /// ```
    /// use mlx_rs_core::distributed;
    /// let group = distributed::init(false)?;
    /// match group.split(group.rank() % 2, -1) {
    ///     Ok(half) => assert!(half.size() <= group.size()),
    ///     Err(e) => println!("{e}"), // a group of one, or of a kind that cannot be split
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a group of one; MLX's message when this kind of group cannot
    /// be split.
    #[doc(alias = "mlx_distributed_group_split")]
    pub fn split(&self, color: i32, key: i32) -> Result<Self> {
        let op = "distributed_split";
        if self.size() <= 1 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                op,
                "a group of one process cannot be split",
            ));
        }
        Self::made(op, || {
            // SAFETY: the handle is live; a null context is the failure value and is checked.
            unsafe { compat::mlx_distributed_group_split(self.raw, color, key) }.ctx
        })
    }

    together! {
        /// The sum of all members' arrays. Every member receives it.
        ///
        /// ```
        /// use mlx_rs_core::{array, distributed};
        /// let group = distributed::init(false)?;
        /// let sum = group.all_sum(&array!([1.0, 2.0])?)?;
        /// assert_eq!(sum.at::<f32>(&[0])?, group.size() as f32);
        /// # Ok::<(), mlx_rs_core::Error>(())
        /// ```
        #[doc(alias = "mlx_distributed_all_sum")]
        all_sum = mlx_distributed_all_sum;
        /// The element-wise maximum of all members' arrays. Every member receives it.
        ///
        /// ```
        /// use mlx_rs_core::{array, distributed};
        /// let group = distributed::init(false)?;
        /// assert_eq!(group.all_max(&array!([group.rank()])?)?.item::<i32>()?, group.size() - 1);
        /// # Ok::<(), mlx_rs_core::Error>(())
        /// ```
        #[doc(alias = "mlx_distributed_all_max")]
        all_max = mlx_distributed_all_max;
        /// The element-wise minimum of all members' arrays. Every member receives it.
        ///
        /// ```
        /// use mlx_rs_core::{array, distributed};
        /// let group = distributed::init(false)?;
        /// assert_eq!(group.all_min(&array!([group.rank()])?)?.item::<i32>()?, 0);
        /// # Ok::<(), mlx_rs_core::Error>(())
        /// ```
        #[doc(alias = "mlx_distributed_all_min")]
        all_min = mlx_distributed_all_min;
    }

    /// All members' arrays, concatenated along the first axis. Every member receives the result.
    ///
    /// ```
    /// use mlx_rs_core::{array, distributed};
    /// let group = distributed::init(false)?;
    /// assert_eq!(group.all_gather(&array!([7, 8])?)?.shape(), [2 * group.size()]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the axis would exceed `i32`.
    #[doc(alias = "mlx_distributed_all_gather")]
    pub fn all_gather(&self, a: &Array) -> Result<Array> {
        let op = "all_gather";
        let first = a.shape().first().copied().unwrap_or(1);
        if first.checked_mul(self.size()).is_none() {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                "the first axis of the result would exceed i32::MAX",
            )
            .with_inputs(&[a]));
        }
        call::array(op, |out, s| {
            // SAFETY: all handles are live; the result's axis fits `i32`.
            unsafe { sys::mlx_distributed_all_gather(out, a.raw(), self.raw, s) }
        })
        .map_err(|e| e.with_inputs(&[a]))
    }

    /// The sum of all members' arrays. Each member receives its part along the first axis.
    ///
    /// ```
    /// use mlx_rs_core::{array, distributed};
    /// let group = distributed::init(false)?;
    /// if group.size() == 1 {
    ///     assert_eq!(group.sum_scatter(&array!([7, 8])?)?.to_vec::<i32>()?, [7, 8]);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the first axis is not divisible by the number of members; MLX's
    /// message when the kind of group does not support it.
    #[doc(alias = "mlx_distributed_sum_scatter")]
    pub fn sum_scatter(&self, a: &Array) -> Result<Array> {
        let op = "sum_scatter";
        let divides = a
            .shape()
            .first()
            .is_some_and(|&n| n % self.size().max(1) == 0);
        if !divides {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!("the first axis does not divide by {} members", self.size()),
            )
            .with_inputs(&[a]));
        }
        call::array(op, |out, s| {
            // SAFETY: all handles are live; the first axis divides.
            unsafe { sys::mlx_distributed_sum_scatter(out, a.raw(), self.raw, s) }
        })
        .map_err(|e| e.with_inputs(&[a]))
    }

    /// Checks that `rank` is another member of the group.
    fn partner(&self, op: &'static str, rank: i32) -> Result<()> {
        if (0..self.size()).contains(&rank) && rank != self.rank() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Index,
            op,
            format!(
                "member {rank} is not another one of a group of {} (this one is {})",
                self.size(),
                self.rank()
            ),
        ))
    }

    /// Sends `a` to member `to` when the returned array, which equals `a`, is evaluated. In a ring,
    /// a member can reach only the previous and the next member. For any other member, MLX aborts
    /// the process.
    ///
    /// ```
    /// use mlx_rs_core::{ErrorKind, array, distributed, eval};
    /// let group = distributed::init(false)?;
    /// if group.size() == 2 && group.rank() == 0 {
    ///     eval([&group.send(&array!([1, 2])?, 1)?])?;
    /// }
    /// assert_eq!(group.send(&array!([1])?, group.size()).unwrap_err().kind(), ErrorKind::Index);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the member does not exist or is this process.
    #[doc(alias = "mlx_distributed_send")]
    pub fn send(&self, a: &Array, to: i32) -> Result<Array> {
        let op = "send";
        self.partner(op, to)?;
        call::array(op, |out, s| {
            // SAFETY: all handles are live; the member exists.
            unsafe { sys::mlx_distributed_send(out, a.raw(), to, self.raw, s) }
        })
        .map_err(|e| e.with_inputs(&[a]))
    }

    /// Receives an array from member `from`, which must send this shape and type. The limits of
    /// rings are those of [`Group::send`].
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, ErrorKind, distributed};
    /// let group = distributed::init(false)?;
    /// if group.size() == 2 && group.rank() == 1 {
    ///     assert_eq!(group.recv(&[2], Dtype::Int32, 0)?.to_vec::<i32>()?, [1, 2]);
    /// }
    /// assert_eq!(group.recv(&[2], Dtype::Int32, -1).unwrap_err().kind(), ErrorKind::Index);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the member does not exist or is this process; [`ErrorKind::Shape`]
    /// for an invalid shape.
    #[doc(alias = "mlx_distributed_recv")]
    pub fn recv(&self, shape: &[i32], dtype: Dtype, from: i32) -> Result<Array> {
        let op = "recv";
        self.partner(op, from)?;
        if memory::checked_bytes(shape, dtype.size()).is_none_or(|b| b > memory::budget()) {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!("shape {shape:?} is negative or exceeds the memory budget"),
            ));
        }
        call::array(op, |out, s| {
            // SAFETY: pointer and length describe the shape; the handle is live and the member
            // exists.
            unsafe {
                sys::mlx_distributed_recv(
                    out,
                    shape.as_ptr(),
                    shape.len(),
                    dtype.raw(),
                    from,
                    self.raw,
                    s,
                )
            }
        })
    }

    /// [`Group::recv`] with the shape and type of `like`.
    ///
    /// ```
    /// use mlx_rs_core::{ErrorKind, array, distributed};
    /// let (group, like) = (distributed::init(false)?, array!([0, 0])?);
    /// if group.size() == 2 && group.rank() == 1 {
    ///     assert_eq!(group.recv_like(&like, 0)?.shape(), [2]);
    /// }
    /// assert_eq!(group.recv_like(&like, -1).unwrap_err().kind(), ErrorKind::Index);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Group::recv`].
    #[doc(alias = "mlx_distributed_recv_like")]
    pub fn recv_like(&self, like: &Array, from: i32) -> Result<Array> {
        let op = "recv";
        self.partner(op, from)?;
        call::array(op, |out, s| {
            // SAFETY: all handles are live; the member exists.
            unsafe { sys::mlx_distributed_recv_like(out, like.raw(), from, self.raw, s) }
        })
    }
}
