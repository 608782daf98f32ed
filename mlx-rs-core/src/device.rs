//! Devices: where operations run, whether this build of MLX supports them, and their properties.
//!
//! ```
//! use mlx_rs_core::Device;
//! # fn main() -> mlx_rs_core::Result<()> {
//! let device = Device::default_device();
//! for (name, value) in device.info()? {
//!     println!("{device}: {name} {value:?}");
//! }
//! assert!(Device::cpu().is_available() && Device::cpu().count()? == 1);
//! # Ok(()) }
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

use mlx_sys as sys;

use crate::call;
use crate::error::{Error, ErrorKind, Result};
use crate::stream;

/// The default device, as one of the three constants below.
static DEFAULT: AtomicU8 = AtomicU8::new(UNSET);
const UNSET: u8 = 0;
const CPU: u8 = 1;
const GPU: u8 = 2;

/// The kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// The host processor.
    Cpu,
    /// A GPU: Metal on Apple silicon, CUDA on NVIDIA.
    Gpu,
}

/// A property of [`Device::info`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceInfo {
    /// A text.
    Text(String),
    /// A number; a size is in bytes.
    Number(usize),
}

/// One device, by kind and index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Device {
    kind: DeviceKind,
    index: i32,
}

impl Device {
    /// The host processor.
    ///
    /// ```
    /// assert!(mlx_rs_core::Device::cpu().is_available());
    /// ```
    #[must_use]
    pub const fn cpu() -> Self {
        Self {
            kind: DeviceKind::Cpu,
            index: 0,
        }
    }

    /// The first GPU. [`Device::is_available`] returns whether it exists.
    ///
    /// ```
    /// use mlx_rs_core::{Device, Stream};
    /// assert_eq!(Stream::new(Device::gpu()).is_ok(), Device::gpu().is_available());
    /// ```
    #[must_use]
    pub const fn gpu() -> Self {
        Self {
            kind: DeviceKind::Gpu,
            index: 0,
        }
    }

    /// The kind of this device.
    ///
    /// ```
    /// use mlx_rs_core::{Device, DeviceKind};
    /// assert_eq!(Device::gpu().kind(), DeviceKind::Gpu);
    /// ```
    #[must_use]
    pub const fn kind(self) -> DeviceKind {
        self.kind
    }

    /// The index among devices of its kind.
    ///
    /// ```
    /// assert_eq!(mlx_rs_core::Device::gpu().index(), 0);
    /// ```
    #[must_use]
    pub const fn index(self) -> i32 {
        self.index
    }

    /// Whether this build of MLX can run operations on the device now.
    ///
    /// ```
    /// use mlx_rs_core::{Device, cuda_is_available, metal_is_available};
    /// assert_eq!(Device::gpu().is_available(), metal_is_available() || cuda_is_available());
    /// ```
    #[must_use]
    pub fn is_available(self) -> bool {
        match self.kind {
            DeviceKind::Cpu => call::loaded().is_ok(),
            DeviceKind::Gpu => metal_is_available() || cuda_is_available(),
        }
    }

    /// The number of devices of this kind.
    ///
    /// ```
    /// use mlx_rs_core::Device;
    /// assert_eq!(Device::cpu().count()?, 1);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When MLX cannot determine it.
    #[doc(alias = "mlx_device_count")]
    pub fn count(self) -> Result<i32> {
        count(self)
    }

    /// The device on which operations run outside of a scope. It is the last device passed to
    /// [`Device::set_default`]; initially the GPU if there is one.
    ///
    /// ```
    /// use mlx_rs_core::{Device, Stream};
    /// assert_eq!(Stream::current()?.device(), Device::default_device());
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn default_device() -> Self {
        match DEFAULT.load(Ordering::Relaxed) {
            CPU => Self::cpu(),
            GPU => Self::gpu(),
            _ => {
                let initial = if Self::gpu().is_available() { GPU } else { CPU };
                // A concurrent `set_default` wins.
                let _ =
                    DEFAULT.compare_exchange(UNSET, initial, Ordering::Relaxed, Ordering::Relaxed);
                Self::default_device()
            }
        }
    }

    /// Makes this the default device of the process, and returns the previous one. Threads inside a
    /// scope keep their stream until the scope ends. Existing arrays are computed on the device on
    /// which their operations were recorded.
    ///
    /// ```
    /// use mlx_rs_core::{Device, Stream};
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let before = Device::cpu().set_default()?;
    /// assert_eq!(Stream::current()?.device(), Device::cpu());
    /// before.set_default()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] when this build of MLX cannot use the device.
    #[doc(alias = "mlx_set_default_device")]
    pub fn set_default(self) -> Result<Self> {
        if !self.is_available() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "set_default",
                format!("this build of MLX has no usable {self} device"),
            ));
        }
        let _guard = call::lock();
        let before = Self::default_device();
        // A few calls have no stream argument and use MLX's own default. SAFETY: the arguments are
        // plain numbers, and the handle is freed below.
        let device = unsafe { sys::mlx_device_new_type(self.raw_kind(), self.index()) };
        let result = call::status("set_default", || {
            // SAFETY: the handle is live; MLX copies the device.
            unsafe { sys::mlx_set_default_device(device) }
        });
        // SAFETY: the handle is owned here.
        unsafe { sys::mlx_device_free(device) };
        result?;
        let value = match self.kind {
            DeviceKind::Cpu => CPU,
            DeviceKind::Gpu => GPU,
        };
        DEFAULT.store(value, Ordering::Relaxed);
        Ok(before)
    }

    /// Runs `f` with this device's default stream as the calling thread's current stream, like
    /// `with mx.stream(device):` in Python. See [`Stream::scope`](crate::Stream::scope). For a
    /// single call, pass a closure with that call.
    ///
    /// ```
    /// use mlx_rs_core::{array, Device};
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let a = array!([1.0, 4.0])?;
    /// let roots = Device::cpu().scope(|| a.sqrt())?;
    /// assert_eq!(roots.to_vec::<f32>()?, [1.0, 2.0]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Errors of `f`; [`ErrorKind::Unsupported`] when this build of MLX cannot use the device.
    pub fn scope<R, E: From<Error>>(self, f: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
        stream::default_for(self)?.scope(f)
    }

    /// MLX's information about the device, such as `device_name`, `architecture` and `memory_size`
    /// (bytes); the names differ between devices.
    ///
    /// ```
    /// use mlx_rs_core::Device;
    /// for (name, value) in Device::cpu().info()? {
    ///     println!("{name}: {value:?}");
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] when there is no such device.
    #[doc(alias(
        "mlx_device_info_new",
        "mlx_device_info_get",
        "mlx_device_info_free",
        "mlx_device_info_is_string",
        "mlx_device_info_get_string",
        "mlx_device_info_get_size",
        "mlx_device_info_get_keys",
        "mlx_metal_device_info"
    ))]
    pub fn info(self) -> Result<BTreeMap<String, DeviceInfo>> {
        if !self.is_available() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "device_info",
                format!("this build of MLX has no usable {self} device"),
            ));
        }
        info::of(self)
    }

    /// Runs `f` with a handle of this device.
    #[cfg(mlx_c_0_5)]
    fn with_raw(self, op: &'static str, f: impl FnOnce(sys::mlx_device) -> i32) -> Result<()> {
        let _guard = call::enter(op)?;
        let ctx = call::handle(op, || {
            // SAFETY: the arguments are plain numbers. The caller checks for null.
            unsafe { sys::mlx_device_new_type(self.raw_kind(), self.index) }.ctx
        })?;
        let device = sys::mlx_device { ctx };
        let result = call::status(op, || f(device));
        // SAFETY: the handle is owned here and not used again.
        unsafe { sys::mlx_device_free(device) };
        result
    }

    pub(crate) fn raw_kind(self) -> sys::mlx_device_type {
        match self.kind {
            DeviceKind::Cpu => sys::mlx_device_type__MLX_CPU,
            DeviceKind::Gpu => sys::mlx_device_type__MLX_GPU,
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            DeviceKind::Cpu => write!(f, "cpu"),
            DeviceKind::Gpu => write!(f, "gpu:{}", self.index),
        }
    }
}

fn flag(op: &'static str, f: impl FnOnce(*mut bool) -> i32) -> Result<bool> {
    let mut answer = false;
    call::status(op, || f(&raw mut answer))?;
    Ok(answer)
}

/// Whether MLX was built with Metal and a Metal device exists.
///
/// ```
/// if mlx_rs_core::metal_is_available() {
///     assert!(cfg!(target_os = "macos"));
/// }
/// ```
#[doc(alias = "mlx_metal_is_available")]
#[must_use]
pub fn metal_is_available() -> bool {
    // SAFETY: the out-pointer is a live bool for the length of the call.
    flag("metal_is_available", |out| unsafe {
        sys::mlx_metal_is_available(out)
    })
    .unwrap_or(false)
}

/// Whether MLX was built with CUDA and a CUDA device exists.
///
/// ```
/// if mlx_rs_core::cuda_is_available() {
///     assert!(!mlx_rs_core::metal_is_available());
/// }
/// ```
#[doc(alias = "mlx_cuda_is_available")]
#[must_use]
pub fn cuda_is_available() -> bool {
    cuda_flag().unwrap_or(false)
}

#[cfg(mlx_c_0_5)]
fn cuda_flag() -> Result<bool> {
    // SAFETY: the out-pointer is a live bool for the length of the call.
    flag("cuda_is_available", |out| unsafe {
        sys::mlx_cuda_is_available(out)
    })
}

#[cfg(mlx_c_0_5)]
fn count(device: Device) -> Result<i32> {
    let mut count = 0;
    // SAFETY: the out-pointer is live for the length of the call.
    call::status("device_count", || unsafe {
        sys::mlx_device_count(&raw mut count, device.raw_kind())
    })?;
    Ok(count)
}

/// mlx-c 0.4 has no such call. MLX 0.30 has one device of each kind.
#[cfg(not(mlx_c_0_5))]
fn count(device: Device) -> Result<i32> {
    let first = Device {
        kind: device.kind,
        index: 0,
    };
    Ok(i32::from(first.is_available()))
}

#[cfg(mlx_c_0_5)]
mod info {
    //! MLX's information about a device, by name.

    use std::collections::BTreeMap;
    use std::ffi::CStr;

    use mlx_sys as sys;

    use super::{Device, DeviceInfo};
    use crate::call;
    use crate::error::Result;

    const OP: &str = "device_info";

    /// Device handles and keys, freed on drop.
    struct Handles {
        info: sys::mlx_device_info,
        keys: sys::mlx_vector_string,
    }

    impl Drop for Handles {
        fn drop(&mut self) {
            // SAFETY: both handles are owned here and not used again.
            unsafe {
                sys::mlx_device_info_free(self.info);
                sys::mlx_vector_string_free(self.keys);
            }
        }
    }

    pub(super) fn of(device: Device) -> Result<BTreeMap<String, DeviceInfo>> {
        let _guard = call::lock();
        // SAFETY: both calls have no arguments. The calls below fill the handles.
        let mut handles = unsafe {
            Handles {
                info: sys::mlx_device_info_new(),
                keys: sys::mlx_vector_string_new(),
            }
        };
        device.with_raw(OP, |dev| {
            // SAFETY: all handles are live.
            unsafe { sys::mlx_device_info_get(&raw mut handles.info, dev) }
        })?;
        // SAFETY: both handles are live.
        call::status(OP, || unsafe {
            sys::mlx_device_info_get_keys(&raw mut handles.keys, handles.info)
        })?;
        // SAFETY: the handle is live.
        let count = unsafe { sys::mlx_vector_string_size(handles.keys) };
        (0..count).map(|i| entry(&handles, i)).collect()
    }

    fn entry(handles: &Handles, i: usize) -> Result<(String, DeviceInfo)> {
        let mut key = std::ptr::null_mut();
        // SAFETY: the index is below the size. The out-pointer is writable.
        call::status(OP, || unsafe {
            sys::mlx_vector_string_get(&raw mut key, handles.keys, i)
        })?;
        // SAFETY: MLX returned a NUL-terminated string that lives as long as the vector.
        let name = unsafe { CStr::from_ptr(key) };
        let mut is_text = false;
        // SAFETY: handle and name are live; the name is one of the handle's keys.
        call::status(OP, || unsafe {
            sys::mlx_device_info_is_string(&raw mut is_text, handles.info, name.as_ptr())
        })?;
        let value = if is_text {
            let mut text = std::ptr::null();
            // SAFETY: handle and name are live, and the value is a string.
            call::status(OP, || unsafe {
                sys::mlx_device_info_get_string(&raw mut text, handles.info, name.as_ptr())
            })?;
            // SAFETY: MLX returned a NUL-terminated string that lives as long as the handle.
            DeviceInfo::Text(
                unsafe { CStr::from_ptr(text) }
                    .to_string_lossy()
                    .into_owned(),
            )
        } else {
            let mut number = 0;
            // SAFETY: handle and name are live, and the value is a number.
            call::status(OP, || unsafe {
                sys::mlx_device_info_get_size(&raw mut number, handles.info, name.as_ptr())
            })?;
            DeviceInfo::Number(number)
        };
        Ok((name.to_string_lossy().into_owned(), value))
    }
}

#[cfg(not(mlx_c_0_5))]
mod info {
    //! The device information of mlx-c 0.4: only for Metal, if it exists.

    use std::collections::BTreeMap;
    use std::ffi::CStr;

    use mlx_sys as sys;

    use super::{Device, DeviceInfo, DeviceKind, metal_is_available};
    use crate::call;
    use crate::error::Result;

    pub(super) fn of(device: Device) -> Result<BTreeMap<String, DeviceInfo>> {
        let mut out = BTreeMap::new();
        if device.kind() == DeviceKind::Cpu || !metal_is_available() {
            // Without Metal the call below would abort the process.
            return Ok(out);
        }
        let _guard = call::lock();
        // SAFETY: Metal is available.
        let info = unsafe { sys::mlx_metal_device_info() };
        // SAFETY: mlx-c ends the name with a zero byte inside the array.
        let name = unsafe { CStr::from_ptr(info.architecture.as_ptr()) };
        let name = name.to_string_lossy().into_owned();
        out.insert(String::from("architecture"), DeviceInfo::Text(name));
        for (key, value) in [
            ("max_buffer_length", info.max_buffer_length),
            (
                "max_recommended_working_set_size",
                info.max_recommended_working_set_size,
            ),
            ("memory_size", info.memory_size),
        ] {
            out.insert(String::from(key), DeviceInfo::Number(value));
        }
        Ok(out)
    }
}

/// mlx-c 0.4 has no such call. A GPU without Metal is a CUDA GPU.
#[cfg(not(mlx_c_0_5))]
fn cuda_flag() -> Result<bool> {
    if metal_is_available() {
        return Ok(false);
    }
    // The answer is derived from MLX's default device, and cached, because `Device::set_default`
    // may change that device later. `set_default` runs this function first.
    static ANSWER: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    if let Some(answer) = ANSWER.get() {
        return Ok(*answer);
    }
    let _guard = call::lock();
    // SAFETY: returns a new handle, freed below.
    let mut device = unsafe { sys::mlx_device_new() };
    let mut kind = sys::mlx_device_type__MLX_CPU;
    // MLX's initial default device is the GPU exactly if there is one. SAFETY: both out-pointers
    // are live.
    let result = call::status("default_device", || unsafe {
        sys::mlx_get_default_device(&raw mut device)
    })
    .and_then(|()| {
        // SAFETY: `device` is a live handle and `kind` a live out-pointer.
        call::status("device_type", || unsafe {
            sys::mlx_device_get_type(&raw mut kind, device)
        })
    });
    // SAFETY: the handle is owned here.
    unsafe { sys::mlx_device_free(device) };
    result.map(|()| *ANSWER.get_or_init(|| kind == sys::mlx_device_type__MLX_GPU))
}
