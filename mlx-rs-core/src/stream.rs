//! Streams: ordered queues of work on a device. Operations use the calling thread's current
//! stream, which [`Stream::scope`] sets; without one, the default stream of the default device, which
//! [`Device::set_default`] and [`Stream::set_default`] change for the whole process.
//!
//! ```
//! use mlx_rs_core::{Device, Stream, ones, Dtype};
//! # fn main() -> mlx_rs_core::Result<()> {
//! let stream = Stream::new(Device::cpu())?;
//! let sum = stream.scope(|| ones(&[4], Dtype::Float32)?.sum(0, false))?;
//! assert_eq!(sum.item::<f32>()?, 4.0);
//! # Ok(()) }
//! ```

use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicPtr, Ordering};

use mlx_sys as sys;
use parking_lot::Mutex;

use crate::call;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};

thread_local! {
    /// The context pointer of the current stream's handle; null means the default stream.
    static CURRENT: Cell<*mut c_void> = const { Cell::new(std::ptr::null_mut()) };
}

/// An ordered queue of work on one device. Work on different streams may run at the same time.
pub struct Stream {
    raw: sys::mlx_stream,
    device: Device,
}

// SAFETY: the handle is a heap copy of a plain (index, device) pair that is never written after
// creation; every call that uses it holds the process-wide lock.
unsafe impl Send for Stream {}
// SAFETY: as for Send; shared use only reads the pair.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream on `device`.
    ///
    /// # Errors
    /// When this build of MLX cannot use the device.
    pub fn new(device: Device) -> Result<Self> {
        Self::make(device, |dev| {
            // SAFETY: `dev` is a live device handle.
            unsafe { sys::mlx_stream_new_device(dev) }
        })
    }

    /// MLX's default stream of `device`.
    ///
    /// # Errors
    /// When this build of MLX cannot use the device.
    pub fn default_of(device: Device) -> Result<Self> {
        Self::make(device, |dev| {
            // SAFETY: creates an empty handle, filled by the next call.
            let mut out = unsafe { sys::mlx_stream_new() };
            // SAFETY: `out` is writable and `dev` a live device handle.
            if unsafe { sys::mlx_get_default_stream(&raw mut out, dev) } == 0 {
                out
            } else {
                sys::mlx_stream {
                    ctx: std::ptr::null_mut(),
                }
            }
        })
    }

    fn make(device: Device, f: impl FnOnce(sys::mlx_device) -> sys::mlx_stream) -> Result<Self> {
        if !device.is_available() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "stream",
                format!("this build of MLX has no usable {device} device"),
            ));
        }
        let _guard = call::lock();
        // SAFETY: takes plain numbers; null is checked.
        let dev = unsafe { sys::mlx_device_new_type(device.raw_kind(), device.index()) };
        if dev.ctx.is_null() {
            return Err(Error::new(
                ErrorKind::Mlx,
                "stream",
                "MLX could not name the device",
            ));
        }
        let raw = f(dev);
        // SAFETY: `dev` is owned here and the stream keeps a copy.
        unsafe { sys::mlx_device_free(dev) };
        if raw.ctx.is_null() {
            return Err(Error::new(
                ErrorKind::Mlx,
                "stream",
                "MLX could not create a stream",
            ));
        }
        Ok(Self { raw, device })
    }

    /// The device this stream runs on.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// MLX's number of this stream, different for every stream of the process.
    ///
    /// # Errors
    /// When MLX cannot say.
    pub fn index(&self) -> Result<i32> {
        let mut index = 0;
        // SAFETY: the handle is live and the out-pointer writable.
        call::status("stream_index", || unsafe {
            sys::mlx_stream_get_index(&raw mut index, self.raw)
        })?;
        Ok(index)
    }

    /// Makes this stream the default of its device, and where operations of every thread run that is
    /// not in a [`Stream::scope`].
    ///
    /// # Errors
    /// When MLX cannot use it.
    pub fn set_default(&self) -> Result<()> {
        let _guard = call::lock();
        // SAFETY: the handle is live; MLX copies what it stands for.
        call::status("set_default_stream", || unsafe {
            sys::mlx_set_default_stream(self.raw)
        })?;
        self.device.set_default()
    }

    /// Runs `f` with this stream as the current one of the calling thread. Scopes nest; the
    /// previous stream is restored afterwards, also when `f` panics.
    pub fn scope<R>(&self, f: impl FnOnce() -> R) -> R {
        struct Restore(*mut c_void);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.with(|c| c.set(self.0));
            }
        }
        // `&self` outlives the scope, so the pointer stays valid while it is current.
        let _restore = Restore(CURRENT.with(|c| c.replace(self.raw.ctx)));
        f()
    }

    /// Waits until all work queued on this stream is done.
    ///
    /// # Errors
    /// When that work failed.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle is live.
        call::status("synchronize", || unsafe { sys::mlx_synchronize(self.raw) })
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("device", &self.device)
            .finish()
    }
}

impl PartialEq for Stream {
    /// Whether both stand for the same queue.
    fn eq(&self, other: &Self) -> bool {
        let _guard = call::lock();
        // SAFETY: both handles are live, which the call needs: it looks without asking.
        unsafe { sys::mlx_stream_equal(self.raw, other.raw) }
    }
}

impl fmt::Display for Stream {
    /// As MLX names it, such as `Stream(Device(cpu, 0), 1)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = call::string("stream", |out| {
            // SAFETY: both handles are live.
            unsafe { sys::mlx_stream_tostring(out, self.raw) }
        });
        f.write_str(&text.unwrap_or_else(|_| String::from("Stream")))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _guard = call::lock();
        // SAFETY: this is the only owner of the handle; MLX keeps the stream itself.
        unsafe { sys::mlx_stream_free(self.raw) };
    }
}

/// The device that operations of this thread run on.
pub(crate) fn current_device() -> Result<Device> {
    let _guard = call::lock();
    let stream = current_raw()?;
    Device::read("stream_device", |out| {
        // SAFETY: the stream is live and the out-pointer a writable device handle.
        unsafe { sys::mlx_stream_get_device(out, stream) }
    })
}

/// The context pointer of the default stream's handle; null until it is first asked for.
static DEFAULT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Streams that were the default once. They live on, since a call may still be using one.
static DEFAULTS: Mutex<Vec<Stream>> = Mutex::new(Vec::new());

/// Makes `stream` the default of this process. Call with the lock held.
pub(crate) fn install_default(stream: Stream) -> Result<()> {
    let index = stream.index()?;
    let mut known = DEFAULTS.lock();
    let mut ctx = std::ptr::null_mut();
    for old in known.iter() {
        if old.device == stream.device && old.index()? == index {
            ctx = old.raw.ctx;
        }
    }
    if ctx.is_null() {
        ctx = stream.raw.ctx;
        known.push(stream);
    }
    DEFAULT.store(ctx, Ordering::Release);
    Ok(())
}

/// The raw handle operations run on. Call with the lock held.
pub(crate) fn current_raw() -> Result<sys::mlx_stream> {
    let ctx = CURRENT.with(Cell::get);
    if !ctx.is_null() {
        return Ok(sys::mlx_stream { ctx });
    }
    let ctx = DEFAULT.load(Ordering::Acquire);
    if !ctx.is_null() {
        return Ok(sys::mlx_stream { ctx });
    }
    // The lock is held, so no second thread can race to install one.
    install_default(Stream::default_of(Device::default_device())?)?;
    Ok(sys::mlx_stream {
        ctx: DEFAULT.load(Ordering::Acquire),
    })
}
