//! Functions with custom gradients or a custom vectorization.

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use mlx_sys as sys;

use super::autodiff::transpose;
use super::{Direction, differentiable, own_nodes, same_shapes, some_output};
use crate::array::{Array, axis_of};
use crate::call;
use crate::closure::{
    self, Closure, ClosureError, CustomVjp, CustomVmap, Failure, Function, Outcome, Payload, Vjp,
    Vmap,
};
use crate::error::{Error, ErrorKind, Result};

const OP: &str = "custom_function";

/// A function whose gradients or vectorization the user defines. What is not defined is derived
/// from the function as usual.
///
/// The graph of every result keeps the functions, and runs them when a transform reaches it. So
/// they must be `Fn + Send + 'static`. Only arguments have gradients; captured arrays are
/// constants. Mirrors `mx.custom_function`.
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms::{CustomFunction, grad}};
/// # fn main() -> Result<()> {
/// // The value of round with the gradient of the identity: a straight-through estimator.
/// let round = CustomFunction::new(|x: &[Array]| -> Result<Vec<Array>> {
///     Ok(vec![x[0].add(&Array::scalar(0.5f32)?)?.floor()?])
/// })
/// .with_vjp(|_primals, cotangents, _outputs| Ok(vec![cotangents[0].clone()]));
/// let g = grad(|x: &[Array]| round.call(x), &[0])(&[Array::scalar(2.7f32)?])?;
/// assert_eq!(g[0].item::<f32>()?, 1.0);
/// # Ok(()) }
/// ```
#[doc(alias = "mlx_custom_function")]
pub struct CustomFunction<E> {
    function: Arc<Payload<Function>>,
    vjp: Option<Arc<Payload<Vjp>>>,
    jvp: Option<Arc<Payload<UserJvp>>>,
    vmap: Option<Arc<Payload<UserVmap>>>,
    error: PhantomData<fn() -> E>,
}

/// MLX's forward mode is not used; see [`jvp`](super::jvp).
const NO_JVP: sys::mlx_closure_custom_jvp = sys::mlx_closure_custom_jvp {
    ctx: std::ptr::null_mut(),
};

type UserJvp = Box<dyn Fn(&[Array], &[Array]) -> Result<Vec<Array>, Failure> + Send>;
type UserVmap =
    Box<dyn Fn(&[Array], &[Option<i32>]) -> Result<(Vec<Array>, Vec<Option<i32>>), Failure> + Send>;

/// The output shapes of one call. The transforms of the call's graph read them.
type Form = Arc<OnceLock<Vec<Vec<i32>>>>;

impl<E: ClosureError> CustomFunction<E> {
    /// A function without custom transforms.
    ///
    /// ```
    /// use mlx_rs_core::{Array, array};
    /// use mlx_rs_core::{Result, transforms::CustomFunction};
    /// let f = CustomFunction::new(|x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].square()?]) });
    /// assert_eq!(f.call(&[array!(3.0)?])?[0].item::<f32>()?, 9.0);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn new<F>(f: F) -> Self
    where
        F: Fn(&[Array]) -> Result<Vec<Array>, E> + Send + 'static,
    {
        let function: Function = Box::new(move |x| {
            let outputs = closure::guarded(|| f(x))?;
            some_output(OP, &outputs)?;
            Ok(own_nodes(outputs)?)
        });
        Self {
            function: Payload::new(function),
            vjp: None,
            jvp: None,
            vmap: None,
            error: PhantomData,
        }
    }

    /// Sets the backward pass. It is a function of the arguments, the output cotangents and the
    /// outputs. It returns one cotangent per argument, with the argument's shape and type.
    ///
    /// ```
    /// use mlx_rs_core::{Array, array};
    /// use mlx_rs_core::{Result, transforms::{CustomFunction, grad}};
    /// let clipped = CustomFunction::new(|x: &[Array]| -> Result<Vec<Array>> { Ok(x.to_vec()) })
    ///     .with_vjp(|_primals, cotangents, _outputs| {
    ///         Ok(vec![cotangents[0].clip(Some(&array!(-1.0)?), Some(&array!(1.0)?))?])
    ///     });
    /// let loss = |x: &[Array]| -> Result<Vec<Array>> {
    ///     Ok(vec![clipped.call(x)?[0].multiply(&array!(100.0)?)?])
    /// };
    /// assert_eq!(grad(loss, &[0])(&[array!(3.0)?])?[0].item::<f32>()?, 1.0);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn with_vjp<G>(mut self, vjp: G) -> Self
    where
        G: Fn(&[Array], &[Array], &[Array]) -> Result<Vec<Array>, E> + Send + 'static,
    {
        let vjp: Vjp = Box::new(move |primals, cotangents, outputs| {
            let given = closure::guarded(|| vjp(primals, cotangents, outputs))?;
            // MLX indexes the cotangents without checks, so they are checked here.
            same_shapes(OP, "returned cotangent", &given, "argument", primals)?;
            for (i, (g, p)) in given.iter().zip(primals).enumerate() {
                if g.dtype() != p.dtype() {
                    return Err(Error::new(
                        ErrorKind::Dtype,
                        OP,
                        format!(
                            "returned cotangent {i} is {}, but argument {i} is {}",
                            g.dtype(),
                            p.dtype()
                        ),
                    )
                    .into());
                }
            }
            Ok(given)
        });
        self.vjp = Some(Payload::new(vjp));
        self
    }

    /// Sets the forward gradient for [`jvp`](super::jvp). It is a function of the arguments and
    /// their tangents. It returns one tangent per output, with the output's shape. Because it is
    /// transposed, it must be linear in the tangents, and must not read their values.
    ///
    /// ```
    /// use mlx_rs_core::{Array, array};
    /// use mlx_rs_core::{Result, transforms::{CustomFunction, jvp}};
    /// let f = CustomFunction::new(|x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].square()?]) })
    ///     .with_jvp(|primals, tangents| {
    ///         Ok(vec![tangents[0].multiply(&primals[0])?.multiply(&array!(2.0)?)?])
    ///     });
    /// let (_, slopes) = jvp(|x: &[Array]| f.call(x), &[array!(3.0)?], &[array!(1.0)?])?;
    /// assert_eq!(slopes[0].item::<f32>()?, 6.0);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn with_jvp<G>(mut self, jvp: G) -> Self
    where
        G: Fn(&[Array], &[Array]) -> Result<Vec<Array>, E> + Send + 'static,
    {
        let jvp: UserJvp =
            Box::new(move |primals, tangents| closure::guarded(|| jvp(primals, tangents)));
        self.jvp = Some(Payload::new(jvp));
        self
    }

    /// Sets the vectorization. It is a function of the arguments and the batch axis of each
    /// argument (`None` means no batch). It returns the outputs and their batch axes.
    ///
    /// ```
    /// use mlx_rs_core::{Array, array};
    /// use mlx_rs_core::{Result, transforms::{CustomFunction, vmap}};
    /// let f = CustomFunction::new(|x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].square()?]) })
    ///     .with_vmap(|x, axes| Ok((vec![x[0].square()?], vec![axes[0]])));
    /// let squares = vmap(|x: &[Array]| f.call(x), 0, 0)(&[array!([1.0, 2.0])?])?;
    /// assert_eq!(squares[0].to_vec::<f32>()?, [1.0, 4.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn with_vmap<G>(mut self, vmap: G) -> Self
    where
        G: Fn(&[Array], &[Option<i32>]) -> Result<(Vec<Array>, Vec<Option<i32>>), E>
            + Send
            + 'static,
    {
        let vmap: UserVmap = Box::new(move |inputs, axes| closure::guarded(|| vmap(inputs, axes)));
        self.vmap = Some(Payload::new(vmap));
        self
    }

    /// Calls the function.
    ///
    /// ```
    /// use mlx_rs_core::{Array, array};
    /// use mlx_rs_core::{Result, transforms::CustomFunction};
    /// let f = CustomFunction::new(|x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].add(&x[1])?]) });
    /// assert_eq!(f.call(&[array!(1.0)?, array!(2.0)?])?[0].item::<f32>()?, 3.0);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the function; [`ErrorKind::Value`] when it returns no arrays. The transform that
    /// runs a custom gradient returns that gradient's errors: its own error values, and
    /// [`ErrorKind::Shape`] or [`ErrorKind::Dtype`] for unsuitable results.
    pub fn call(&self, args: &[Array]) -> Result<Vec<Array>, E> {
        closure::run_here(OP, || {
            let form: Form = Arc::default();
            let function = self.recording(&form)?;
            let vjp = match Direction::current() {
                Direction::Reverse => self.vjp.as_ref().map(shared_vjp),
                Direction::Forward => self.jvp.as_ref().map(transposed),
            }
            .transpose()?;
            let vmap = self
                .vmap
                .as_ref()
                .map(|f| checked_vmap(f, &form))
                .transpose()?;
            let mut custom = Closure::empty();
            call::status(OP, || {
                // SAFETY: the result is writable and null, the closures are live or null.
                unsafe {
                    sys::mlx_custom_function(
                        custom.out(),
                        function.raw(),
                        CustomVjp::raw_or_null(vjp.as_ref()),
                        NO_JVP,
                        CustomVmap::raw_or_null(vmap.as_ref()),
                    )
                }
            })?;
            custom.apply(OP, args)
        })
    }

    /// The function, which also records the shapes of its outputs.
    fn recording(&self, form: &Form) -> Result<Closure> {
        let (function, form) = (Arc::clone(&self.function), Arc::clone(form));
        let direction = Direction::current();
        Closure::new(Payload::new(Box::new(move |x| {
            let outputs = direction.during(|| (function.body)(x))?;
            form.get_or_init(|| outputs.iter().map(|a| a.shape().to_vec()).collect());
            Ok(outputs)
        })))
    }
}

fn shared_vjp(vjp: &Arc<Payload<Vjp>>) -> Result<CustomVjp> {
    let vjp = Arc::clone(vjp);
    CustomVjp::new(Box::new(move |p, c, o| (vjp.body)(p, c, o)))
}

/// The backward pass, by transposing the forward gradient. The forward gradient is linear in the
/// tangents, so it may be transposed at any point.
fn transposed(jvp: &Arc<Payload<UserJvp>>) -> Result<CustomVjp> {
    let jvp = Arc::clone(jvp);
    CustomVjp::new(Box::new(move |primals, cotangents, outputs| {
        let zeros = |a: &Array| crate::zeros(a.shape(), a.dtype());
        // Arguments that are not floating-point have no tangent.
        let smooth: Vec<usize> = (0..primals.len())
            .filter(|&i| differentiable(OP, "argument", i, &primals[i]).is_ok())
            .collect();
        let at = smooth
            .iter()
            .map(|&i| zeros(&primals[i]))
            .collect::<Result<Vec<_>>>()?;
        let mut forward = |tangents: &[Array]| -> Outcome {
            let mut all = primals.iter().map(zeros).collect::<Result<Vec<_>>>()?;
            for (&i, tangent) in smooth.iter().zip(tangents) {
                all[i] = tangent.clone();
            }
            let given = (jvp.body)(primals, &all)?;
            same_shapes(OP, "returned tangent", &given, "output", outputs)?;
            let given = given.iter().zip(outputs).map(|(g, o)| g.astype(o.dtype()));
            Ok(own_nodes(given.collect::<Result<Vec<_>>>()?)?)
        };
        let mut products = transpose(OP, &mut forward, &at, cotangents)?.into_iter();
        let mut all = primals.iter().map(zeros).collect::<Result<Vec<_>>>()?;
        for i in smooth {
            if let Some(product) = products.next() {
                all[i] = product;
            }
        }
        Ok(all)
    }))
}

/// Checks that results have the shapes of the function's outputs.
fn fits(given: &[&[i32]], shapes: &[Vec<i32>], what: &str) -> Result<()> {
    if given.len() != shapes.len() {
        return Err(Error::new(
            ErrorKind::Shape,
            OP,
            format!(
                "{} {what}s were returned for {} outputs",
                given.len(),
                shapes.len()
            ),
        ));
    }
    for (i, (g, s)) in given.iter().zip(shapes).enumerate() {
        if g != s {
            return Err(Error::new(
                ErrorKind::Shape,
                OP,
                format!("{what} {i} has shape {g:?}, but output {i} has shape {s:?}"),
            ));
        }
    }
    Ok(())
}

fn checked_vmap(vmap: &Arc<Payload<UserVmap>>, form: &Form) -> Result<CustomVmap> {
    let (vmap, form) = (Arc::clone(vmap), Arc::clone(form));
    let body: Vmap = Box::new(move |inputs, axes| {
        let axes: Vec<Option<i32>> = axes.iter().map(|&a| (a >= 0).then_some(a)).collect();
        let n = inputs
            .iter()
            .zip(&axes)
            .find_map(|(x, a)| x.dim((*a)?).ok());
        let Some(n) = n else {
            return Err(Error::new(ErrorKind::Mlx, OP, "MLX vectorized without a batch").into());
        };
        let (outputs, out_axes) = (vmap.body)(inputs, &axes)?;
        if outputs.len() != out_axes.len() {
            return Err(Error::new(
                ErrorKind::Value,
                OP,
                format!(
                    "{} outputs were returned with {} batch axes; return one for each",
                    outputs.len(),
                    out_axes.len()
                ),
            )
            .into());
        }
        let (mut batched, mut places, mut rest) = (Vec::new(), Vec::new(), Vec::new());
        for (output, axis) in outputs.into_iter().zip(out_axes) {
            match axis {
                Some(axis) => {
                    let axis = axis_of(OP, axis, output.ndim())?;
                    let mut shape = output.shape().to_vec();
                    let examples = shape.remove(axis);
                    if examples != n {
                        return Err(Error::new(
                            ErrorKind::Shape,
                            OP,
                            format!(
                                "axis {axis} of shape {:?} does not hold the {n} examples",
                                output.shape()
                            ),
                        )
                        .into());
                    }
                    rest.push(shape);
                    places.push(axis as i32);
                    batched.push(output);
                }
                // MLX would move axes of an output without a batch, so such an output gets a batch.
                None => {
                    rest.push(output.shape().to_vec());
                    let shape: Vec<i32> = std::iter::once(n)
                        .chain(output.shape().iter().copied())
                        .collect();
                    batched.push(output.expand_dims(0)?.broadcast_to(&shape)?);
                    places.push(0);
                }
            }
        }
        let shapes = form.get().map_or(&[][..], Vec::as_slice);
        fits(
            &rest.iter().map(Vec::as_slice).collect::<Vec<_>>(),
            shapes,
            "example",
        )?;
        Ok((batched, places))
    });
    CustomVmap::new(body)
}

/// `f` with a custom backward pass; see [`CustomFunction::with_vjp`]. Mirrors `mx.custom_vjp`.
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms::{custom_vjp, grad}};
/// # fn main() -> Result<()> {
/// // The identity, with gradients scaled by 10.
/// let scaled = custom_vjp(
///     |x: &[Array]| -> Result<Vec<Array>> { Ok(x.to_vec()) },
///     |_primals, cotangents, _outputs| Ok(vec![cotangents[0].multiply(&Array::scalar(10.0f32)?)?]),
/// );
/// assert_eq!(grad(scaled, &[0])(&[Array::scalar(1.0f32)?])?[0].item::<f32>()?, 10.0);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`CustomFunction::call`].
pub fn custom_vjp<F, G, E>(
    f: F,
    vjp: G,
) -> impl Fn(&[Array]) -> Result<Vec<Array>, E> + Send + Sync + 'static
where
    F: Fn(&[Array]) -> Result<Vec<Array>, E> + Send + 'static,
    G: Fn(&[Array], &[Array], &[Array]) -> Result<Vec<Array>, E> + Send + 'static,
    E: ClosureError,
{
    let custom = CustomFunction::new(f).with_vjp(vjp);
    move |args| custom.call(args)
}

/// Returns `f` with a custom forward gradient; see [`CustomFunction::with_jvp`].
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms::{custom_jvp, jvp}};
/// # fn main() -> Result<()> {
/// let f = custom_jvp(
///     |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].abs()?]) },
///     |primals, tangents| Ok(vec![tangents[0].multiply(&primals[0].sign()?)?]),
/// );
/// let one = Array::scalar(1.0f32)?;
/// let (_, slopes) = jvp(&f, &[Array::scalar(-2.0f32)?], &[one])?;
/// assert_eq!(slopes[0].item::<f32>()?, -1.0);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`CustomFunction::call`].
pub fn custom_jvp<F, G, E>(
    f: F,
    jvp: G,
) -> impl Fn(&[Array]) -> Result<Vec<Array>, E> + Send + Sync + 'static
where
    F: Fn(&[Array]) -> Result<Vec<Array>, E> + Send + 'static,
    G: Fn(&[Array], &[Array]) -> Result<Vec<Array>, E> + Send + 'static,
    E: ClosureError,
{
    let custom = CustomFunction::new(f).with_jvp(jvp);
    move |args| custom.call(args)
}

/// Returns `f` with a custom vectorization; see [`CustomFunction::with_vmap`].
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms::{custom_vmap, vmap}};
/// # fn main() -> Result<()> {
/// let double = custom_vmap(
///     |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].add(&x[0])?]) },
///     |x, axes| Ok((vec![x[0].add(&x[0])?], vec![axes[0]])),
/// );
/// let batch = Array::vector(&[1.0f32, 2.0])?;
/// assert_eq!(vmap(double, 0, 0)(&[batch])?[0].to_vec::<f32>()?, [2.0, 4.0]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`CustomFunction::call`].
pub fn custom_vmap<F, G, E>(
    f: F,
    vmap: G,
) -> impl Fn(&[Array]) -> Result<Vec<Array>, E> + Send + Sync + 'static
where
    F: Fn(&[Array]) -> Result<Vec<Array>, E> + Send + 'static,
    G: Fn(&[Array], &[Option<i32>]) -> Result<(Vec<Array>, Vec<Option<i32>>), E> + Send + 'static,
    E: ClosureError,
{
    let custom = CustomFunction::new(f).with_vmap(vmap);
    move |args| custom.call(args)
}
