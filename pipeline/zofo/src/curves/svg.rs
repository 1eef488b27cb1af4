//! The picture as text.

use std::fmt::Write as _;

use super::{Chart, Curve, axis::Axis};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 56.0;

/// Points of a line at most: more cannot be seen.
const POINTS: usize = 600;
/// Curves that are also shown as they are; more of them would hide each other.
const RAW: usize = 3;
/// Characters of a name in the legend at most.
const NAME: usize = 40;
/// Width of a character of the legend, generously.
const CHARACTER: f64 = 6.6;

/// Colours that people with any colour vision tell apart (Okabe and Ito, "Color universal design", 2008), less the yellow, which is too pale for lines.
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"];
/// Dashes, of another number than the colours so that pairs repeat late.
const DASHES: [&str; 6] = ["", "7 4", "2 3", "10 3 2 3", "14 4", "5 2 2 2 2 2"];

/// Mean of the values within half a window of each, fewer at the ends.
fn smoothed(points: &[(f64, f64)], window: usize) -> Vec<(f64, f64)> {
    let half = window / 2;
    let mean = |i: usize| {
        // As far to one side as to the other, so that the ends lag behind nothing.
        let reach = half.min(i).min(points.len() - 1 - i);
        let near = &points[i - reach..=i + reach];
        near.iter().map(|(_, y)| y).sum::<f64>() / near.len() as f64
    };
    points.iter().enumerate().map(|(i, (x, _))| (*x, mean(i))).collect()
}

/// Steps that a point of the smoothed line is the mean of: about a fifteenth of all, an odd number.
fn window(points: usize) -> usize {
    points / 15 / 2 * 2 + 1
}

/// Means of neighbours, so many that few enough points are left.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let size = points.len().div_ceil(POINTS).max(1);
    let mean = |part: &[(f64, f64)]| {
        let n = part.len() as f64;
        (part.iter().map(|(x, _)| x).sum::<f64>() / n, part.iter().map(|(_, y)| y).sum::<f64>() / n)
    };
    points.chunks(size).map(mean).collect()
}

pub(super) fn write(chart: &Chart) -> String {
    let finite = |c: &Curve| c.points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect::<Vec<_>>();
    let raw: Vec<Vec<(f64, f64)>> = chart.curves.iter().map(finite).collect();
    let smooth: Vec<_> = raw.iter().map(|p| smoothed(p, window(p.len()))).collect();
    let with_raw = raw.len() <= RAW;
    let shown = || smooth.iter().chain(raw.iter().filter(|_| with_raw)).flatten();
    let range = |of: fn(&(f64, f64)) -> f64| {
        let bounds = shown().map(of).fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        if bounds.0 <= bounds.1 { bounds } else { (0.0, 1.0) }
    };
    let ((x0, x1), (y0, y1)) = (range(|p| p.0), range(|p| p.1));
    let frame = Frame { x: Axis::whole(x0, x1, 8), y: Axis::new(y0, y1, 6) };

    let mut out = String::new();
    let _ = write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" \
         font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif\" font-size=\"12\" fill=\"#24292f\">\n\
         <title>{}</title>\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n",
        escaped(&chart.title)
    );
    let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"26\" font-size=\"15\" font-weight=\"600\">{}</text>", escaped(&cut(&chart.title, 80)));
    frame.draw(&mut out, chart);
    for (i, points) in raw.iter().enumerate().filter(|(_, p)| with_raw && p.len() > 1) {
        line(&mut out, &frame, points, &format!("stroke=\"{}\" stroke-width=\"1\" stroke-opacity=\"0.35\"", COLOURS[i % COLOURS.len()]));
    }
    for (i, points) in smooth.iter().enumerate() {
        match points[..] {
            [] => {}
            [one] => {
                let (x, y) = frame.place(one);
                let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{}\"/>", COLOURS[i % COLOURS.len()]);
            }
            _ => line(&mut out, &frame, points, &stroke(i)),
        }
    }
    legend(&mut out, chart, &raw);
    out.push_str("</svg>\n");
    out
}

fn stroke(i: usize) -> String {
    let dash = DASHES[i % DASHES.len()];
    let dash = if dash.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dash}\"") };
    format!("stroke=\"{}\" stroke-width=\"2\"{dash}", COLOURS[i % COLOURS.len()])
}

fn line(out: &mut String, frame: &Frame, points: &[(f64, f64)], stroke: &str) {
    let _ = write!(out, "<polyline fill=\"none\" {stroke} stroke-linejoin=\"round\" points=\"");
    for (i, point) in thinned(points).into_iter().enumerate() {
        let (x, y) = frame.place(point);
        let _ = write!(out, "{}{x:.1},{y:.1}", if i == 0 { "" } else { " " });
    }
    out.push_str("\"/>\n");
}

/// The area of the curves.
struct Frame {
    x: Axis,
    y: Axis,
}

impl Frame {
    fn place(&self, (x, y): (f64, f64)) -> (f64, f64) {
        (LEFT + self.x.place(x) * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - self.y.place(y) * (HEIGHT - TOP - BOTTOM))
    }

    fn draw(&self, out: &mut String, chart: &Chart) {
        let (right, floor) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for (value, label) in self.y.ticks() {
            let (_, y) = self.place((self.x.low, value));
            let _ = writeln!(out, "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"#d8dee4\" stroke-width=\"1\"/>");
            let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", LEFT - 8.0, y + 4.0);
        }
        for (value, label) in self.x.ticks() {
            let (x, _) = self.place((value, self.y.low));
            let _ = writeln!(out, "<path d=\"M{x:.1} {floor}v5\" stroke=\"#57606a\" stroke-width=\"1\"/>");
            let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>", floor + 19.0);
        }
        let _ = writeln!(out, "<path d=\"M{LEFT} {TOP}V{floor}H{right}\" fill=\"none\" stroke=\"#57606a\" stroke-width=\"1\"/>");
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            (LEFT + right) / 2.0,
            HEIGHT - 14.0,
            escaped(&chart.x)
        );
        let middle = (TOP + floor) / 2.0;
        let _ = writeln!(
            out,
            "<text x=\"20\" y=\"{middle:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 20 {middle:.1})\">{}</text>",
            escaped(&chart.y)
        );
    }
}

/// In the upper right corner, which falling curves leave empty.
fn legend(out: &mut String, chart: &Chart, raw: &[Vec<(f64, f64)>]) {
    let entry = |curve: &Curve, points: &[(f64, f64)]| {
        let w = window(points.len());
        let note = if w > 1 { format!(", mean of {w} steps") } else { String::new() };
        format!("{}{note}", cut(&curve.name, NAME))
    };
    let entries: Vec<String> = chart.curves.iter().zip(raw).map(|(c, p)| entry(c, p)).collect();
    let longest = entries.iter().map(|e| e.chars().count()).max().unwrap_or(0);
    if longest == 0 {
        return;
    }
    let width = 52.0 + CHARACTER * longest as f64;
    let (x, y) = (WIDTH - RIGHT - width - 6.0, TOP + 6.0);
    let _ = writeln!(
        out,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"#ffffff\" fill-opacity=\"0.85\" stroke=\"#d8dee4\"/>",
        18.0 * entries.len() as f64 + 8.0
    );
    for (i, entry) in entries.iter().enumerate() {
        let middle = y + 13.0 + 18.0 * i as f64;
        let _ = writeln!(out, "<path d=\"M{:.1} {middle:.1}h32\" {}/>", x + 8.0, stroke(i));
        let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>", x + 46.0, middle + 4.0, escaped(entry));
    }
}

/// At most so many characters.
fn cut(text: &str, characters: usize) -> String {
    if text.chars().count() <= characters {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(characters - 1).collect();
    short.push('…');
    short
}

/// Text in XML. Characters that XML cannot have become spaces.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn falling(n: usize) -> Vec<(f64, f64)> {
        (1..=n).map(|i| (i as f64, 3.0 / i as f64 + (i * 7 % 5) as f64 / 20.0)).collect()
    }

    fn chart(curves: Vec<Curve>) -> String {
        Chart::losses("a <b> & c", curves).to_svg()
    }

    #[test]
    fn smoothing_keeps_lines_and_means() {
        let line: Vec<_> = (0..30).map(|i| (f64::from(i), 2.0 * f64::from(i))).collect();
        assert_eq!(smoothed(&line, 5), line);
        assert_eq!(smoothed(&[(0.0, 1.0), (1.0, 4.0), (2.0, 1.0)], 3)[1], (1.0, 2.0));
        assert_eq!((window(5), window(30), window(200)), (1, 3, 13));
        assert_eq!(thinned(&falling(1200)).len(), 600);
    }

    #[test]
    fn one_line_each_and_the_raw_one_behind_few() {
        for (curves, lines) in [(1, 2), (3, 6), (4, 4), (15, 15)] {
            let svg = chart((0..curves).map(|i| Curve::new(format!("r{i}"), falling(40))).collect());
            assert_eq!(svg.matches("<polyline").count(), lines, "{curves}");
            assert!(svg.contains("optimiser step") && svg.contains("(nats)") && svg.contains("r0, mean of 3 steps"));
        }
    }

    #[test]
    fn text_is_escaped_and_odd_numbers_are_left_out() {
        let svg = chart(vec![Curve::new("x\u{1}\"<", vec![(1.0, f64::NAN), (2.0, f64::INFINITY), (3.0, 1.0)]), Curve::new("none", vec![])]);
        assert!(svg.contains("a &lt;b&gt; &amp; c") && svg.contains("x &quot;&lt;") && svg.contains("<circle"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn long_runs_make_small_files_with_the_same_bytes() {
        let svg = chart(vec![Curve::new("long", falling(100_000))]);
        assert!(svg.len() < 32 << 10, "{}", svg.len());
        assert_eq!(svg, chart(vec![Curve::new("long", falling(100_000))]));
    }
}
