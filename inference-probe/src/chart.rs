//! Charts as SVG: curves over layers, and matrices of layers.

use std::fmt::Write as _;

/// One curve.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// The name in the legend.
    pub name: String,
    /// Points from left to right. The curve is interrupted at values that are not finite.
    pub points: Vec<(f64, f64)>,
}

impl Curve {
    /// A curve with one value at each position 0, 1, ...
    pub fn new(name: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Self {
        let places = (0u32..).map(f64::from);
        Self {
            name: name.into(),
            points: places.zip(values).collect(),
        }
    }
}

/// The meaning of a chart's axes.
struct Axes<'a> {
    /// The label of the horizontal axis, whose ticks are integers.
    across: &'a str,
    /// Names of the positions 0, 1, ..., which replace the numbers.
    names: Option<&'a [String]>,
    /// The label of the vertical axis.
    up: &'a str,
    /// Whether the vertical axis starts at 0.
    from_zero: bool,
}

const COLORS: [&str; 6] = [
    "#2463eb", "#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#495057",
];
/// The color of notes.
const NOTE: &str = "#c92a2a";
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 56.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 44.0;
/// The legend has a separate column, so that it never covers a curve.
const RIGHT: f64 = 140.0;

pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// A step of 1, 2 or 5 times a power of ten that divides `range` into at most `parts` parts.
fn step(range: f64, parts: f64) -> f64 {
    let raw = range / parts;
    let power = 10f64.powf(raw.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|f| f * power)
        .find(|s| *s >= raw * (1.0 - 1e-9))
        .unwrap_or(10.0 * power)
}

fn open(width: f64, height: f64, title: &str) -> String {
    let title = escaped(title);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\" role=\"img\" aria-label=\"{title}\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"14\" font-weight=\"bold\">{title}</text>\n"
    )
}

/// Returns an SVG chart of curves over the layers `0, 1, ...`. The vertical axis covers all values.
pub fn lines(title: &str, axis: &str, curves: &[Curve]) -> String {
    let axes = Axes {
        across: "layer",
        names: None,
        up: axis,
        from_zero: false,
    };
    over(title, &axes, curves)
}

/// Returns an SVG chart of losses over the steps of a training run. The vertical axis starts at 0.
pub fn losses(title: &str, axis: &str, curves: &[Curve]) -> String {
    let axes = Axes {
        across: "step",
        names: None,
        up: axis,
        from_zero: true,
    };
    over(title, &axes, curves)
}

/// [`lines`] with a prominent note below the title. An empty note is omitted.
pub fn noted_lines(title: &str, note: &str, axis: &str, curves: &[Curve]) -> String {
    let svg = lines(title, axis, curves);
    if note.is_empty() {
        return svg;
    }
    let note = format!(
        "<text x=\"{LEFT}\" y=\"36\" font-size=\"11\" fill=\"{NOTE}\">{}</text>\n</svg>",
        escaped(note)
    );
    svg.replacen("</svg>", &note, 1)
}

/// Returns an SVG chart of curves. `places` is the label of the horizontal axis, and `names` are
/// the labels of its equally spaced positions.
pub fn lines_at(
    title: &str,
    (places, names): (&str, &[String]),
    axis: &str,
    curves: &[Curve],
) -> String {
    let axes = Axes {
        across: places,
        names: Some(names),
        up: axis,
        from_zero: false,
    };
    over(title, &axes, curves)
}

fn over(title: &str, axes: &Axes<'_>, curves: &[Curve]) -> String {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let zero = axes.from_zero.then_some(0.0);
    let values = points().map(|point| point.1).filter(|v| v.is_finite());
    let (low, high) = values
        .chain(zero)
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| {
            (l.min(v), h.max(v))
        });
    let (low, high) = if low > high { (0.0, 1.0) } else { (low, high) };
    let tick = step((high - low).max(1e-9 * high.abs()).max(1e-12), 5.0);
    let low = (low / tick).floor() * tick;
    let high = ((high / tick).ceil() * tick).max(low + tick);
    let end = points().map(|point| point.0).fold(1.0, f64::max);
    let right = WIDTH - RIGHT;
    let x = |at: f64| LEFT + (right - LEFT) * at / end;
    let y = |v: f64| HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (v - low) / (high - low);

    let mut svg = open(WIDTH, HEIGHT, title);
    let mut write = |text: String| svg.push_str(&text);
    let digits = (-tick.log10().floor()).clamp(0.0, 9.0) as usize;
    let ticks = ((high - low) / tick).round() as usize;
    for i in 0..=ticks {
        let value = low + i as f64 * tick;
        let at = y(value);
        write(format!(
            "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value:.digits$}</text>\n",
            LEFT - 6.0,
            at + 4.0
        ));
    }
    // Layers and steps are integers, so the ticks of their axis are, too.
    let every = step(end, 10.0).max(1.0) as usize;
    for i in (0..=end as usize).step_by(every) {
        let name = match axes.names {
            Some(names) => names.get(i).map(|name| escaped(name)).unwrap_or_default(),
            None => i.to_string(),
        };
        write(format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{name}</text>\n",
            x(i as f64),
            HEIGHT - BOTTOM + 18.0
        ));
    }
    write(format!(
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
         <text x=\"14\" y=\"{:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 14 {:.1})\">{}</text>\n",
        0.5 * (LEFT + right),
        HEIGHT - 8.0,
        escaped(axes.across),
        0.5 * (TOP + HEIGHT - BOTTOM),
        0.5 * (TOP + HEIGHT - BOTTOM),
        escaped(axes.up)
    ));
    let drawn = curves.iter().filter(|curve| !curve.points.is_empty());
    for (n, curve) in drawn.enumerate() {
        let color = COLORS[n % COLORS.len()];
        let dash = if n >= COLORS.len() {
            " stroke-dasharray=\"5 3\""
        } else {
            ""
        };
        let mut path = String::new();
        let mut pen = 'M';
        for (at, value) in &curve.points {
            if value.is_finite() {
                let _ = write!(path, "{pen}{:.1} {:.1}", x(*at), y(*value));
                pen = 'L';
            } else {
                pen = 'M';
            }
        }
        let legend = TOP + 8.0 + 18.0 * n as f64;
        write(format!(
            "<path d=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"{dash}/>\n\
             <line x1=\"{:.1}\" y1=\"{legend:.1}\" x2=\"{:.1}\" y2=\"{legend:.1}\" stroke=\"{color}\" \
             stroke-width=\"2\"{dash}/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>\n",
            right + 10.0,
            right + 30.0,
            right + 36.0,
            legend + 4.0,
            escaped(&curve.name)
        ));
    }
    svg.push_str("</svg>\n");
    svg
}

/// A matrix of layers by layers. Colors range from white (`low`) to blue (`high`); values that are
/// not finite are grey.
pub fn heat_map(title: &str, rows: &[Vec<f64>], low: f64, high: f64) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cell = (400.0 / rows.len().max(columns).max(1) as f64).clamp(4.0, 40.0);
    let (width, height) = (cell * columns as f64, cell * rows.len() as f64);
    let mut svg = open((width + 160.0).max(360.0), height + TOP + BOTTOM, title);
    for (r, row) in rows.iter().enumerate() {
        for (c, value) in row.iter().enumerate() {
            let fill = if value.is_finite() {
                let part = ((value - low) / (high - low)).clamp(0.0, 1.0);
                let mix = |to: f64| (255.0 + (to - 255.0) * part).round() as u8;
                format!("#{:02x}{:02x}{:02x}", mix(24.0), mix(70.0), mix(160.0))
            } else {
                String::from("#bbbbbb")
            };
            let _ = writeln!(
                svg,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{cell:.2}\" height=\"{cell:.2}\" \
                 fill=\"{fill}\"><title>{r}, {c}: {value:.4}</title></rect>",
                LEFT + cell * c as f64,
                TOP + cell * r as f64
            );
        }
    }
    let every = step(columns.max(rows.len()).max(2) as f64, 10.0).max(1.0) as usize;
    for i in (0..columns).step_by(every) {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{i}</text>",
            LEFT + cell * (i as f64 + 0.5),
            TOP + height + 16.0
        );
    }
    for i in (0..rows.len()).step_by(every) {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{i}</text>",
            LEFT - 6.0,
            TOP + cell * (i as f64 + 0.5) + 4.0
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\">white {low:.2}, blue {high:.2}</text>\n</svg>",
        LEFT,
        TOP + height + 36.0
    );
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_steps() {
        assert_eq!(step(1.0, 5.0), 0.2);
        assert_eq!(step(30.0, 10.0), 5.0);
        assert_eq!(step(9.0, 10.0), 1.0);
    }

    #[test]
    fn curves_and_names_are_in_the_chart() {
        let curve = Curve::new("a<b", [0.0, f64::NAN, 1.0, 0.5]);
        let svg = lines("t & u", "value", std::slice::from_ref(&curve));
        assert!(svg.contains("a&lt;b") && svg.contains("t &amp; u"));
        // The curve must be interrupted at the missing value.
        let path = svg.split("d=\"").nth(1).unwrap().split('"').next().unwrap();
        assert_eq!(path.matches('M').count(), 2, "{path}");
        assert!(!svg.contains("NaN"));
        assert!(lines("empty", "value", &[]).contains("</svg>"));
        let names = ["8", "16", "<all>", "4"].map(String::from);
        let svg = lines_at("t", ("features", &names), "value", &[curve]);
        assert!(svg.contains("&lt;all&gt;") && svg.contains(">features<"));
        assert!(!svg.contains(">layer<"));
    }

    #[test]
    fn points_stand_where_the_axes_say() {
        let curve = Curve {
            name: String::from("training"),
            points: vec![(0.0, 4.0), (5.0, 2.0), (10.0, 0.0)],
        };
        let none = Curve::new("validation", []);
        let svg = losses("loss", "nats", &[curve, none]);
        // The corners of the plot, and its middle.
        assert!(
            svg.contains("d=\"M56.0 40.0L278.0 158.0L500.0 276.0\""),
            "{svg}"
        );
        assert!(svg.contains(">training</text>") && !svg.contains("validation"));
        assert!(
            svg.contains(">10</text>") && svg.contains(">4</text>"),
            "{svg}"
        );
        // The axis must start at 0, although all values are far above.
        let high = losses("loss", "nats", &[Curve::new("a", [3.0, 4.0])]);
        assert!(high.contains(">0</text>"), "{high}");
    }

    #[test]
    fn a_matrix_has_a_cell_for_each_value() {
        let svg = heat_map("m", &[vec![0.0, 1.0], vec![f64::NAN, 0.5]], 0.0, 1.0);
        assert_eq!(svg.matches("<title>").count(), 4);
        assert!(svg.contains("#ffffff") && svg.contains("#1846a0") && svg.contains("#bbbbbb"));
    }
}
