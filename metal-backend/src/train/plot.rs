//! The loss curves as an SVG image. `train_log.rs` provides the data.

use std::fmt::Write as _;

/// Width and height of the image, in pixels.
const SIZE: (f64, f64) = (800.0, 480.0);
/// Margins around the curves: left, right, above, below. The legend is above, because the curves
/// may cross any place inside.
const MARGINS: (f64, f64, f64, f64) = (72.0, 24.0, 48.0, 56.0);

/// A named curve of finite points (step, loss).
pub(super) struct Curve<'a> {
    pub name: &'a str,
    pub color: &'a str,
    pub points: &'a [(u64, f64)],
}

/// The distance between the marks of an axis from 0 to `end`: 1, 2 or 5 times a power of ten, with
/// at most ten marks.
fn spacing(end: f64) -> f64 {
    let power = 10f64.powf((end / 10.0).log10().floor());
    let fits = |step: &f64| end / step <= 10.0;
    let steps = [1.0, 2.0, 5.0, 10.0].map(|n| n * power);
    steps.into_iter().find(fits).unwrap_or(end)
}

/// Draws the curves from 0 to `last` steps and from 0 to `highest` nats; both are above 0.
pub(super) fn svg(curves: &[Curve<'_>], last: u64, highest: f64) -> String {
    let last = last as f64;
    let (left, right, above, below) = MARGINS;
    let (width, height) = (SIZE.0 - left - right, SIZE.1 - above - below);
    let x = |step: f64| left + step / last * width;
    let y = |loss: f64| above + (1.0 - loss / highest) * height;
    let (bottom, end) = (y(0.0), x(last));
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        SIZE.0, SIZE.1
    );
    // Writing to a string does not fail.
    let mut put = |line: std::fmt::Arguments<'_>| {
        let _ = writeln!(out, "{line}");
    };
    // Steps are integers, and so are their marks.
    let (steps, losses) = (spacing(last).max(1.0), spacing(highest));
    let marks = |step: f64, end: f64| {
        (0..=10)
            .map(move |n| f64::from(n) * step)
            .take_while(move |at| *at <= end)
    };
    // As many decimals as the spacing has.
    let digits = (-losses.log10().floor()).max(0.0) as usize;
    for step in marks(steps, last) {
        let at = x(step);
        put(format_args!(
            "<line x1=\"{at:.1}\" y1=\"{above}\" x2=\"{at:.1}\" y2=\"{bottom}\" stroke=\"#ddd\"/>\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{step:.0}</text>",
            bottom + 18.0
        ));
    }
    for loss in marks(losses, highest) {
        let at = y(loss);
        put(format_args!(
            "<line x1=\"{left}\" y1=\"{at:.1}\" x2=\"{end}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{loss:.digits$}</text>",
            left - 8.0,
            at + 4.0
        ));
    }
    put(format_args!(
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">step</text>\
         <text transform=\"translate(20 {}) rotate(-90)\" text-anchor=\"middle\">\
         loss (nats per token)</text>",
        left + width / 2.0,
        SIZE.1 - 14.0,
        above + height / 2.0
    ));
    for (n, curve) in curves.iter().filter(|c| !c.points.is_empty()).enumerate() {
        let at: Vec<String> = curve
            .points
            .iter()
            .map(|&(step, loss)| format!("{:.2},{:.2}", x(step as f64), y(loss)))
            .collect();
        let (color, start) = (curve.color, left + 140.0 * n as f64);
        put(format_args!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>\n\
             <line x1=\"{start}\" y1=\"24\" x2=\"{}\" y2=\"24\" stroke=\"{color}\" stroke-width=\"2\"/>\
             <text x=\"{}\" y=\"28\">{}</text>",
            at.join(" "),
            start + 24.0,
            start + 32.0,
            curve.name
        ));
    }
    out + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_and_few() {
        for (end, step) in [
            (20.0, 2.0),
            (3.15, 0.5),
            (1.0, 0.1),
            (1050.0, 200.0),
            (0.00105, 0.0002),
        ] {
            assert!(
                (spacing(end) / step - 1.0).abs() < 1e-9,
                "{end}: {}",
                spacing(end)
            );
        }
    }

    #[test]
    fn points_stand_where_the_axes_say() {
        let points = [(0, 4.0), (5, 2.0), (10, 0.0)];
        let curve = Curve {
            name: "training",
            color: "blue",
            points: &points,
        };
        let none = Curve {
            name: "validation",
            color: "red",
            points: &[],
        };
        let picture = svg(&[curve, none], 10, 4.0);
        // The corners of 704 by 376 pixels, and the middle.
        assert!(
            picture.contains("points=\"72.00,48.00 424.00,236.00 776.00,424.00\""),
            "{picture}"
        );
        assert!(picture.contains(">training</text>") && !picture.contains("validation"));
        assert!(
            picture.contains(">10</text>") && picture.contains(">4.0</text>"),
            "{picture}"
        );
    }
}
