//! `partywall ping --plot`: the latency at each percentile as a picture (SVG) that needs nothing else.
//!
//! Both scales are logarithmic. Each step to the right is a tenth of the messages before it: 90 %, 99 %, 99.9 %.
//!
//! The crate `plotters` is not used because it draws text only in a font that the program has registered, so it needs a font of the
//! system or inside of this program. Here the browser chooses the font.

use std::fmt::Write as _;

use hdrhistogram::Histogram;

use super::exchange::PingResults;
use crate::human;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
/// Left, top, right and bottom of where curves are.
const AREA: [f64; 4] = [80.0, 50.0, 700.0, 350.0];
/// Points of a curve.
const POINTS: u32 = 200;
/// Colours that people with any kind of sight tell apart.
const COLOURS: [&str; 3] = ["#0072b2", "#e69f00", "#009e73"];

/// The whole file.
pub(super) fn draw(target: &str, size: u32, results: &PingResults) -> String {
    let ways = results.ways.iter().flat_map(|[there, back]| [("there", there), ("back", back)]);
    let curves: Vec<(&str, &Histogram<u64>)> = [("round trip", &results.round_trip)].into_iter().chain(ways).collect();
    let scales = Scales::of(&curves);
    let [left, top, right, bottom] = AREA;

    let mut svg = String::new();
    let title = format!("{target}: {} messages of {size} bytes", results.round_trip.len());
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{left}\" y=\"24\" font-size=\"16\">{}</text>",
        escaped(&title)
    );
    for decade in scales.first..=scales.last {
        let y = scales.y(10f64.powi(decade));
        let name = human::nanos(10u64.saturating_pow(decade.unsigned_abs()));
        grid(&mut svg, [left, y, right, y], [left - 6.0, y + 4.0], "end", &name);
    }
    for nines in 0..=scales.nines {
        let x = scales.x(f64::from(nines));
        let name = match nines {
            0 => "0 %".to_owned(),
            1 => "90 %".to_owned(),
            more => format!("99{}{} %", if more > 2 { "." } else { "" }, "9".repeat(more as usize - 2)),
        };
        grid(&mut svg, [x, top, x, bottom], [x, bottom + 18.0], "middle", &name);
    }
    for (n, (name, histogram)) in curves.iter().enumerate() {
        let colour = COLOURS[n % COLOURS.len()];
        let points: Vec<String> = (0..=POINTS)
            .map(|step| {
                let nines = f64::from(scales.nines) * f64::from(step) / f64::from(POINTS);
                let latency = histogram.value_at_quantile(1.0 - 10f64.powf(-nines));
                format!("{:.1},{:.1}", scales.x(nines), scales.y(latency.max(1) as f64))
            })
            .collect();
        let points = points.join(" ");
        let _ = writeln!(svg, "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{points}\"/>");
        let y = top + 16.0 * (n as f64 + 1.0);
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{y}\" fill=\"{colour}\">{name}</text>", left + 10.0);
    }
    svg.push_str("</svg>\n");
    svg
}

/// A line of the grid and its name.
fn grid(svg: &mut String, [x1, y1, x2, y2]: [f64; 4], [x, y]: [f64; 2], anchor: &str, name: &str) {
    let _ = writeln!(
        svg,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#ddd\"/>\
         <text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{name}</text>"
    );
}

/// The ranges of the two scales.
struct Scales {
    /// Powers of ten, in nanoseconds.
    first: i32,
    last: i32,
    /// Up to which percentile there are messages enough: 3 is 99.9 %.
    nines: u32,
}

impl Scales {
    fn of(curves: &[(&str, &Histogram<u64>)]) -> Self {
        let least = curves.iter().map(|(_, histogram)| histogram.min()).min().unwrap_or(1).max(1);
        let most = curves.iter().map(|(_, histogram)| histogram.max()).max().unwrap_or(1).max(least);
        let count = curves.first().map_or(1, |(_, histogram)| histogram.len()).max(1);
        let decade = |value: u64| i32::try_from(value.ilog10()).unwrap_or(0);
        Self { first: decade(least), last: decade(most) + 1, nines: count.ilog10().max(1) }
    }

    fn x(&self, nines: f64) -> f64 {
        AREA[0] + (AREA[2] - AREA[0]) * nines / f64::from(self.nines)
    }

    fn y(&self, nanos: f64) -> f64 {
        let share = (nanos.log10() - f64::from(self.first)) / f64::from(self.last - self.first);
        AREA[3] - (AREA[3] - AREA[1]) * share
    }
}

/// Escapes a peer's name, which is untrusted text.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(latencies: impl Iterator<Item = u64> + Clone, ways: bool) -> PingResults {
        let histogram = || {
            let mut histogram = Histogram::new_with_bounds(1, 60_000_000_000, 3).unwrap();
            latencies.clone().for_each(|latency| histogram.record(latency).unwrap());
            histogram
        };
        PingResults { round_trip: histogram(), ways: ways.then(|| [histogram(), histogram()]) }
    }

    fn points(svg: &str) -> Vec<(f64, f64)> {
        let line = svg.lines().find(|line| line.starts_with("<polyline")).unwrap();
        let points = line.split("points=\"").nth(1).unwrap().trim_end_matches("\"/>").split(' ');
        points
            .map(|point| point.split_once(',').unwrap())
            .map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap()))
            .collect()
    }

    #[test]
    fn latency_curve_rises_and_stays_inside_its_area() {
        let svg = draw("a:ping", 64, &results((1..=10_000).map(|n| n * 100), false));
        let points = points(&svg);
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 >= pair[1].1), "{svg}");
        let [left, top, right, bottom] = AREA;
        assert!(points.iter().all(|(x, y)| (left..=right).contains(x) && (top..=bottom).contains(y)), "{svg}");
        // From 100 ns, a line of the grid, to 1 ms, another.
        assert!(points[0].1 > bottom - 1.0 && points[200].1 < top + 70.0, "{svg}");
        for text in ["10000 messages of 64 bytes", ">99.99 %<", ">100 ns<", ">round trip<"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
    }

    #[test]
    fn one_message_and_each_way_and_strange_names_are_drawn() {
        let svg = draw("<script>&", 1, &results(std::iter::once(0), true));
        assert!(
            svg.contains("&lt;script&gt;&amp;: 1 messages") && !svg.contains("NaN") && !svg.contains("inf"),
            "{svg}"
        );
        assert_eq!(svg.matches("<polyline").count(), 3);
        assert!(svg.contains(">there<") && svg.contains(">back<"), "{svg}");
    }
}
