//! Streams: ordered queues of work on a device. Operations use the calling thread's current stream,
//! which [`Stream::scope`] and [`Device::scope`] set. The default is the default stream of the
//! default device.

use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use mlx_sys as sys;
use parking_lot::Mutex;

use crate::call;
use crate::device::{Device, DeviceKind};
use crate::error::{Error, ErrorKind, Result};

thread_local! {
    /// The context pointer of the current stream's handle. Null means the default stream.
    static CURRENT: Cell<*mut c_void> = const { Cell::new(std::ptr::null_mut()) };
}

/// Whether a CPU stream has ever existed. If not, no graph contains CPU operations.
static CPU_IN_USE: AtomicBool = AtomicBool::new(false);

/// See [`CPU_IN_USE`].
pub(crate) fn cpu_in_use() -> bool {
    CPU_IN_USE.load(Ordering::Relaxed)
}

/// The maximum number of streams from [`Stream::new`] that exist at once. MLX keeps a thread for
/// each until the process ends, and crashes if a thread cannot be started.
const MOST: usize = 512;

/// An ordered queue of work on one device. Work on different streams may run at the same time.
#[doc(alias = "mlx_stream_tostring")]
pub struct Stream {
    raw: sys::mlx_stream,
    device: Device,
    /// Shared with other handles of the stream; `None` for a default stream.
    lease: Option<Arc<Lease>>,
}

/// All handles to one of MLX's streams share this value. When it is dropped, the stream can be
/// reused.
struct Lease;

// SAFETY: the handle is a heap copy of a plain (index, device) pair, which is never written after
// creation. Every call that uses the handle takes the process-wide lock.
unsafe impl Send for Stream {}
// SAFETY: see the note for `Send`. Shared use only reads the pair.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream on `device`.
    ///
    /// ```
    /// use mlx_rs_core::{Device, Stream};
    /// let (a, b) = (Stream::new(Device::cpu())?, Stream::new(Device::cpu())?);
    /// assert_ne!(a, b);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// MLX never frees a stream. When all handles to a stream are dropped, the stream is reused.
    /// The operations queued on it run before those of its next owner.
    ///
    /// # Errors
    /// When this build of MLX cannot use the device; [`ErrorKind::Unsupported`] when 512 streams
    /// exist, or the system cannot start a thread.
    #[doc(alias("mlx_stream_new_device", "mlx_stream_new_thread_unsafe"))]
    pub fn new(device: Device) -> Result<Self> {
        let _guard = call::enter("stream")?;
        let mut made = MADE.lock();
        let free =
            (made.iter()).position(|m| m.handle.device == device && m.lease.strong_count() == 0);
        if let Some(place) = free {
            let mut stream = made[place].handle.copy()?;
            stream.lease = Some(made[place].rent());
            return Ok(stream);
        }
        refuse_more(made.len())?;
        let mut stream = Self::fresh(device)?;
        let handle = stream.copy()?;
        let index = handle.index();
        made.push(Made {
            handle,
            index,
            lease: Weak::new(),
        });
        let place = made.len() - 1;
        stream.lease = Some(made[place].rent());
        Ok(stream)
    }

    /// Creates a new stream in MLX. All threads may use it, because the lock serializes them.
    fn fresh(device: Device) -> Result<Self> {
        Self::make(device, |dev| {
            #[cfg(not(mlx_c_0_7))]
            // SAFETY: `dev` is a live device handle.
            return unsafe { sys::mlx_stream_new_device(dev) };
            // In 0.7, streams made in another way belong to the thread that creates them, and end
            // with the thread. SAFETY: `dev` is a live device handle.
            #[cfg(mlx_c_0_7)]
            unsafe {
                sys::mlx_stream_new_thread_unsafe(dev)
            }
        })
    }

    /// Returns another handle to the same stream.
    fn copy(&self) -> Result<Self> {
        let _guard = call::enter("stream")?;
        let ctx = call::handle("stream", || {
            // SAFETY: creates an empty handle, filled by the next call.
            let mut raw = unsafe { sys::mlx_stream_new() };
            // SAFETY: both handles are live; MLX copies the second one's stream.
            unsafe { sys::mlx_stream_set(&raw mut raw, self.raw) };
            raw.ctx
        })?;
        Ok(Self {
            raw: sys::mlx_stream { ctx },
            device: self.device,
            lease: None,
        })
    }

    /// The default stream of `device`, the same in all threads.
    ///
    /// ```
    /// use mlx_rs_core::{Device, Stream};
    /// let a = Stream::default_of(Device::cpu())?;
    /// assert_eq!(a, Stream::default_of(Device::cpu())?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When this build of MLX cannot use the device.
    #[doc(alias = "mlx_get_default_stream")]
    pub fn default_of(device: Device) -> Result<Self> {
        default_for(device)?.copy()
    }

    /// Creates the stream that [`default_for`] caches.
    fn make_default(device: Device) -> Result<Self> {
        // In mlx-c 0.7, each thread has its own default streams, so this creates a stream for all
        // threads.
        if cfg!(mlx_c_0_7) {
            return Self::fresh(device);
        }
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
        let _guard = call::enter("stream")?;
        // SAFETY: the arguments are plain numbers. Null is checked.
        let dev = unsafe { sys::mlx_device_new_type(device.raw_kind(), device.index()) };
        if dev.ctx.is_null() {
            return Err(Error::new(
                ErrorKind::Mlx,
                "stream",
                "MLX could not name the device",
            ));
        }
        let raw = f(dev);
        // SAFETY: `dev` is owned here, and the stream keeps a copy of the device.
        unsafe { sys::mlx_device_free(dev) };
        if raw.ctx.is_null() {
            return Err(Error::new(
                ErrorKind::Mlx,
                "stream",
                "MLX could not create a stream",
            ));
        }
        if device.kind() == DeviceKind::Cpu {
            CPU_IN_USE.store(true, Ordering::Relaxed);
        }
        Ok(Self {
            raw,
            device,
            lease: None,
        })
    }

    /// The current stream of the calling thread: the stream of the innermost [`Stream::scope`] or
    /// [`Device::scope`]. Outside of a scope it is the default device's stream.
    ///
    /// ```
    /// use mlx_rs_core::{Device, Stream};
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let stream = Stream::new(Device::cpu())?;
    /// let inside = stream.scope(Stream::current)?;
    /// assert_eq!(inside, stream);
    /// assert_ne!(Stream::current()?, stream);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the default device cannot be used.
    #[doc(alias = "mlx_stream_get_device")]
    pub fn current() -> Result<Self> {
        let _guard = call::enter("stream")?;
        let raw = current_raw()?;
        // SAFETY: both calls create empty handles, which are filled below. The device's handle is
        // freed here.
        let (mut copy, mut device) = unsafe { (sys::mlx_stream_new(), sys::mlx_device_new()) };
        let mut kind = sys::mlx_device_type__MLX_CPU;
        let result = call::status("stream", || {
            // SAFETY: all handles are live, and the results are writable. After a failing call, no
            // other call follows.
            unsafe {
                match sys::mlx_stream_get_device(&raw mut device, raw) {
                    0 => match sys::mlx_device_get_type(&raw mut kind, device) {
                        0 => sys::mlx_stream_set(&raw mut copy, raw),
                        failed => failed,
                    },
                    failed => failed,
                }
            }
        });
        // SAFETY: the handle is owned here.
        unsafe { sys::mlx_device_free(device) };
        let device = if kind == sys::mlx_device_type__MLX_GPU {
            Device::gpu()
        } else {
            Device::cpu()
        };
        // Owned from here on, so it is freed even if a call failed.
        let mut stream = Self {
            raw: copy,
            device,
            lease: None,
        };
        result?;
        let index = stream.index();
        stream.lease = (MADE.lock().iter())
            .find(|m| m.index == index && m.handle.device == device)
            .and_then(|m| m.lease.upgrade());
        Ok(stream)
    }

    /// The number that identifies this stream.
    ///
    /// ```
    /// use mlx_rs_core::{Device, Stream};
    /// let (a, b) = (Stream::new(Device::cpu())?, Stream::new(Device::cpu())?);
    /// assert_ne!(a.index(), b.index());
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_stream_get_index")]
    #[must_use]
    pub fn index(&self) -> i32 {
        let _guard = call::lock();
        let mut index = -1;
        // SAFETY: the handle is live and the result writable; the call cannot fail.
        unsafe { sys::mlx_stream_get_index(&raw mut index, self.raw) };
        index
    }

    /// The device this stream runs on.
    ///
    /// ```
    /// use mlx_rs_core::{Device, Stream};
    /// assert_eq!(Stream::new(Device::cpu())?.device(), Device::cpu());
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// Runs `f` with this stream as the current one of the calling thread. Scopes nest; the
    /// previous stream is restored afterwards, also when `f` panics.
    ///
    /// ```
    /// use mlx_rs_core::{Device, Stream, array};
    /// let (stream, a) = (Stream::new(Device::cpu())?, array!([1.0, 2.0])?);
    /// let b = stream.scope(|| a.add(&a))?; // will run there
    /// assert_eq!(b.to_vec::<f32>()?, [2.0, 4.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
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

    /// Waits until all operations queued on this stream have finished.
    ///
    /// ```
    /// use mlx_rs_core::{Device, Stream, array, async_eval};
    /// let stream = Stream::new(Device::cpu())?;
    /// let a = stream.scope(|| array!([4.0])?.sqrt())?;
    /// async_eval([&a])?;
    /// stream.synchronize()?; // the work is done
    /// assert_eq!(a.item::<f32>()?, 2.0);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When one of these operations failed.
    #[doc(alias = "mlx_synchronize")]
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle is live.
        call::status("synchronize", || unsafe { sys::mlx_synchronize(self.raw) })
    }
}

impl PartialEq for Stream {
    /// Whether both handles refer to the same queue.
    fn eq(&self, other: &Self) -> bool {
        self.device == other.device && self.index() == other.index()
    }
}

impl Eq for Stream {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("device", &self.device)
            .field("index", &self.index())
            .finish()
    }
}

impl fmt::Display for Stream {
    /// Prints the stream as MLX does, such as `Stream(Device(cpu, 0), 1)`.
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
        let Some(_guard) = call::lock_to_free() else {
            return;
        };
        // SAFETY: this is the only owner of the handle; MLX keeps the stream itself.
        unsafe { sys::mlx_stream_free(self.raw) };
    }
}

/// The default stream of a device. It is created on first use and never freed, because it may be
/// current on any thread.
pub(crate) fn default_for(device: Device) -> Result<&'static Stream> {
    static DEFAULTS: [OnceLock<Stream>; 2] = [const { OnceLock::new() }; 2];
    let slot = &DEFAULTS[device.kind() as usize];
    if let Some(stream) = slot.get() {
        return Ok(stream);
    }
    let _guard = call::enter("stream")?;
    if let Some(stream) = slot.get() {
        return Ok(stream);
    }
    let stream = Stream::make_default(device)?;
    Ok(slot.get_or_init(|| stream))
}

/// A stream made by this crate. MLX keeps it to the end of the process.
struct Made {
    handle: Stream,
    index: i32,
    /// Cannot be upgraded if the stream is free for reuse.
    lease: Weak<Lease>,
}

impl Made {
    fn rent(&mut self) -> Arc<Lease> {
        let lease = Arc::new(Lease);
        self.lease = Arc::downgrade(&lease);
        lease
    }
}

static MADE: Mutex<Vec<Made>> = Mutex::new(Vec::new());

/// Returns an error beyond the maximum number of streams, or if the system cannot start a thread
/// for a stream.
fn refuse_more(made: usize) -> Result<()> {
    let refused = |why: String| Err(Error::new(ErrorKind::Unsupported, "stream", why));
    if made >= MOST {
        return refused(format!(
            "{made} streams exist, the maximum; drop some, or share one between threads"
        ));
    }
    // If MLX could not start the stream's thread, it would keep the stream and crash later. So
    // check first that the system can start a thread.
    match std::thread::Builder::new().spawn(|| ()) {
        Ok(thread) => {
            let _ = thread.join();
            Ok(())
        }
        Err(e) => refused(format!("the system starts no thread for it: {e}")),
    }
}

/// Waits until all started operations on all streams have finished.
pub(crate) fn wait_for_all() {
    let _guard = call::lock();
    for made in MADE.lock().iter() {
        // Failures have already been reported, so they are ignored here.
        let _ = made.handle.synchronize();
    }
    for device in [Device::cpu(), Device::gpu()] {
        if device.is_available() {
            let _ = default_for(device).map(Stream::synchronize);
        }
    }
}

/// The raw handle of the current stream. Call with the lock held.
pub(crate) fn current_raw() -> Result<sys::mlx_stream> {
    let ctx = CURRENT.with(Cell::get);
    if !ctx.is_null() {
        return Ok(sys::mlx_stream { ctx });
    }
    Ok(default_for(Device::default_device())?.raw)
}

/// The index of the current stream. Call with the lock held.
pub(crate) fn current_index() -> Result<i32> {
    index_of(current_raw()?)
}

/// The index of a stream. Call with the lock held.
pub(crate) fn index_of(raw: sys::mlx_stream) -> Result<i32> {
    let mut index = 0;
    call::status("stream", || {
        // SAFETY: the result is writable and the handle live.
        unsafe { sys::mlx_stream_get_index(&raw mut index, raw) }
    })?;
    Ok(index)
}

/// The current stream's device and index, which identify the stream. Call with the lock held.
pub(crate) fn current_id() -> Result<(DeviceKind, i32)> {
    let raw = current_raw()?;
    let index = index_of(raw)?;
    // SAFETY: makes an empty handle, filled and freed below.
    let mut device = unsafe { sys::mlx_device_new() };
    let mut kind = sys::mlx_device_type__MLX_CPU;
    let result = call::status("stream", || {
        // SAFETY: the device handle is writable, the stream handle live.
        unsafe { sys::mlx_stream_get_device(&raw mut device, raw) }
    })
    .and_then(|()| {
        call::status("stream", || {
            // SAFETY: the result is writable and the handle live.
            unsafe { sys::mlx_device_get_type(&raw mut kind, device) }
        })
    });
    // SAFETY: the handle is owned here.
    unsafe { sys::mlx_device_free(device) };
    result?;
    let kind = if kind == sys::mlx_device_type__MLX_GPU {
        DeviceKind::Gpu
    } else {
        DeviceKind::Cpu
    };
    Ok((kind, index))
}
