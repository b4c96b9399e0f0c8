//! Pictures of results, each as SVG and as PNG.

use std::{fs, path::Path, sync::Once};

use plotters::{
    coord::Shift,
    prelude::*,
    style::{FontStyle, register_font},
};

use crate::{
    error::{BenchError, During, Result},
    mechanism::Mechanism,
    report::{cell::Cell, metric::Metric, stats::RunSummary, unit},
};

/// Pixels of a picture.
const SIZE: (u32, u32) = (1120, 620);
/// Pixels of the legend, right of a chart.
const LEGEND: u32 = 240;
/// The name under which the built-in font is known to the drawing library.
const FONT: &str = "sans-serif";

/// The quantity of an axis, and its scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Axis {
    /// Bytes, each step twice the last.
    Bytes,
    /// Bytes per second, evenly.
    Rate,
    /// Bytes per second, each step ten times the last.
    RateByTens,
    /// Nanoseconds, each step ten times the last.
    TimeByTens,
    /// Percents, evenly.
    Percent,
    /// Numbers of things, each step ten times the last.
    CountByTens,
    /// Numbers of things, evenly.
    Number,
    /// Seconds since a begin, evenly.
    Seconds,
    /// Bytes per second of slow streams, evenly.
    EvenRate,
    /// Ratios close to 1, evenly, with all of the range shown.
    Ratio,
}

impl Axis {
    /// Where a value lies.
    fn place(self, value: f64) -> f64 {
        match self {
            Self::Bytes => value.max(1.0).log2(),
            Self::RateByTens | Self::TimeByTens | Self::CountByTens => value.max(1e-3).log10(),
            Self::Rate => value / 1e9,
            Self::Percent | Self::Number | Self::Seconds | Self::EvenRate | Self::Ratio => value,
        }
    }

    /// The label at a place of the axis.
    fn label(self, place: f64) -> String {
        match self {
            Self::Bytes => unit::bytes(place.exp2().round() as u64),
            Self::Rate => unit::digits(place),
            Self::RateByTens => unit::rate(10f64.powf(place)),
            Self::TimeByTens => unit::nanoseconds(10f64.powf(place)),
            Self::Percent => format!("{place:.0} %"),
            Self::CountByTens => format!("{:.0}", 10f64.powf(place)),
            Self::Number => format!("{place:.0}"),
            Self::Seconds => format!("{place:.1} s"),
            Self::EvenRate => unit::rate(place),
            Self::Ratio => format!("{place:.3}"),
        }
    }

    /// The range to draw for places from `low` to `high`.
    fn range(self, low: f64, high: f64) -> std::ops::Range<f64> {
        match self {
            Self::Bytes => low - 0.3..high + 0.3,
            Self::RateByTens | Self::TimeByTens | Self::CountByTens => low.floor()..high.ceil().max(low.floor() + 1.0),
            Self::Rate | Self::Percent | Self::Number | Self::EvenRate => 0.0..(high * 1.08).max(f64::MIN_POSITIVE),
            Self::Seconds => low..high.max(low + f64::MIN_POSITIVE),
            Self::Ratio => low - 0.005..high + 0.005,
        }
    }

    /// How many labels suit the range.
    fn labels(self, range: &std::ops::Range<f64>) -> usize {
        match self {
            Self::Bytes => 12,
            Self::RateByTens | Self::TimeByTens | Self::CountByTens => (range.end - range.start) as usize + 1,
            Self::Number => (range.end as usize + 1).min(10),
            Self::Rate | Self::Percent | Self::Seconds | Self::EvenRate | Self::Ratio => 10,
        }
    }
}

/// One line of a chart.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    /// As in the legend.
    pub(crate) name: String,
    /// Decides the colour.
    pub(crate) mechanism: Mechanism,
    /// Broken, to tell it from another line of the same mechanism.
    pub(crate) dashed: bool,
    /// From left to right.
    pub(crate) points: Vec<(f64, RunSummary)>,
}

impl Series {
    /// The cells of one mechanism, over a numeric setting, solid, with all values multiplied by `scale`.
    pub(crate) fn of(cells: &[Cell], mechanism: Mechanism, x: &str, metric: Metric, scale: f64) -> Self {
        let point = |cell: &Cell| {
            let s = cell.summary(metric)?;
            let s = RunSummary { median: s.median * scale, min: s.min * scale, max: s.max * scale, ..s };
            Some((cell.key.number(x)? as f64, s))
        };
        let points = cells.iter().filter(|cell| cell.key.mechanism == mechanism).filter_map(point).collect();
        Self { name: mechanism.to_string(), mechanism, dashed: false, points }
    }
}

/// A chart of lines.
#[derive(Debug, Clone)]
pub(crate) struct Chart {
    /// The text above the chart.
    pub(crate) title: String,
    /// Below it, and how.
    pub(crate) x: (&'static str, Axis),
    /// Beside it, and how.
    pub(crate) y: (&'static str, Axis),
    /// The curves of the plot. Empty ones are left out.
    pub(crate) series: Vec<Series>,
}

/// The colour of a mechanism, the same in every picture and told apart by most kinds of eyes.
pub(crate) fn colour(mechanism: Mechanism) -> RGBColor {
    match mechanism {
        Mechanism::Partywall => RGBColor(0, 90, 181),
        Mechanism::PartywallFixed => RGBColor(86, 180, 233),
        Mechanism::PartywallZeroCopy => RGBColor(0, 158, 115),
        Mechanism::PartywallMessage => RGBColor(120, 94, 240),
        Mechanism::PartywallCall => RGBColor(90, 60, 200),
        Mechanism::PlainRing => RGBColor(90, 90, 90),
        Mechanism::OneLine => RGBColor(170, 170, 170),
        Mechanism::TwoLine => RGBColor(120, 120, 120),
        Mechanism::Eventfd => RGBColor(20, 20, 20),
        Mechanism::Unix => RGBColor(213, 94, 0),
        Mechanism::Tcp => RGBColor(204, 121, 167),
        Mechanism::TcpVeth => RGBColor(220, 38, 127),
        Mechanism::TcpVirtio => RGBColor(220, 38, 127),
        Mechanism::Vsock => RGBColor(140, 86, 75),
        Mechanism::SerialRelay => RGBColor(230, 159, 0),
        Mechanism::Transparent => RGBColor(0, 114, 178),
        Mechanism::Pipe => RGBColor(230, 159, 0),
        Mechanism::Ice => RGBColor(204, 121, 167),
        Mechanism::XmlRpc => RGBColor(230, 159, 0),
        Mechanism::Grpc => RGBColor(220, 38, 127),
        Mechanism::Capnp => RGBColor(140, 86, 75),
        Mechanism::Iceoryx2Call => RGBColor(0, 158, 115),
        Mechanism::PartywallPython => RGBColor(86, 180, 233),
        Mechanism::Memfd => RGBColor(90, 90, 90),
        Mechanism::Local => RGBColor(90, 90, 90),
        Mechanism::Bindfs => RGBColor(170, 170, 170),
        Mechanism::PartywallFs => RGBColor(0, 90, 181),
        Mechanism::PartywallFsTcp => RGBColor(213, 94, 0),
        Mechanism::Sshfs => RGBColor(230, 159, 0),
        Mechanism::Nfs => RGBColor(204, 121, 167),
        Mechanism::NineP => RGBColor(140, 86, 75),
        Mechanism::Virtiofs => RGBColor(0, 158, 115),
        Mechanism::PartywallGateway => RGBColor(0, 90, 181),
        Mechanism::Iperf3 => RGBColor(213, 94, 0),
        Mechanism::PartywallNet => RGBColor(0, 90, 181),
        Mechanism::Testpmd => RGBColor(213, 94, 0),
        Mechanism::PartywallBlk => RGBColor(0, 90, 181),
        Mechanism::QemuStorageDaemon => RGBColor(213, 94, 0),
        Mechanism::VirtioBlk => RGBColor(220, 38, 127),
        Mechanism::PmemWindow => RGBColor(0, 90, 181),
        Mechanism::Ivshmem => RGBColor(213, 94, 0),
        Mechanism::Iceoryx2 => RGBColor(150, 120, 0),
        Mechanism::Iceoryx2ZeroCopy => RGBColor(110, 150, 30),
    }
}

/// One bar of a bar chart.
#[derive(Debug, Clone)]
pub(crate) struct Bar {
    /// The text to the left of the bar.
    pub(crate) name: String,
    /// Decides the colour.
    pub(crate) mechanism: Mechanism,
    /// How long it is.
    pub(crate) value: RunSummary,
    /// The text after the bar's end.
    pub(crate) label: String,
}

/// A chart of horizontal bars, under headings.
#[derive(Debug, Clone)]
pub(crate) struct Bars {
    /// The text above the chart.
    pub(crate) title: String,
    /// Below it, and how.
    pub(crate) x: (&'static str, Axis),
    /// From top to bottom.
    pub(crate) groups: Vec<(String, Vec<Bar>)>,
}

/// A chart over time, with moments that have a number each.
#[derive(Debug, Clone)]
pub(crate) struct MarkedChart {
    /// The lines.
    pub(crate) chart: Chart,
    /// Where on the horizontal axis, and what happened, in order.
    pub(crate) marks: Vec<(f64, String)>,
}

/// Anything that can be drawn.
#[derive(Debug, Clone)]
pub(crate) enum Picture {
    /// Lines.
    Chart(Chart),
    /// Lines over time.
    MarkedChart(MarkedChart),
    /// Bars.
    Bars(Bars),
}

impl Picture {
    fn is_empty(&self) -> bool {
        match self {
            Self::Chart(chart) | Self::MarkedChart(MarkedChart { chart, .. }) => {
                chart.series.iter().all(|series| series.points.is_empty())
            }
            Self::Bars(bars) => bars.groups.iter().all(|(_, bars)| bars.is_empty()),
        }
    }

    fn size(&self) -> (u32, u32) {
        match self {
            Self::Chart(_) | Self::MarkedChart(_) => SIZE,
            Self::Bars(bars) => {
                let rows: usize = bars.groups.iter().map(|(_, bars)| bars.len() + 1).sum();
                (SIZE.0, 110 + ROW * rows as u32)
            }
        }
    }
}

/// Pixels of a row of a bar chart.
const ROW: u32 = 26;
/// Pixels of the names left of bars.
const NAMES: u32 = 215;

/// Draws `picture` as `stem.svg` and `stem.png` in `folder`. Without data there is no picture.
pub(crate) fn draw(folder: &Path, stem: &str, picture: &Picture) -> Result<()> {
    register_fonts();
    if picture.is_empty() {
        return Ok(());
    }
    fs::create_dir_all(folder).during(format!("making {}", folder.display()))?;
    let path = |extension: &str| folder.join(format!("{stem}.{extension}"));
    let fault = |e: String| BenchError::transport(&format!("drawing {stem}"), e);
    paint(&SVGBackend::new(&path("svg"), picture.size()).into_drawing_area(), picture).map_err(fault)?;
    paint(&BitMapBackend::new(&path("png"), picture.size()).into_drawing_area(), picture).map_err(fault)
}

/// The picture as SVG to stand in a page. Without data there is none.
pub(crate) fn svg(stem: &str, picture: &Picture) -> Result<Option<String>> {
    register_fonts();
    if picture.is_empty() {
        return Ok(None);
    }
    let mut text = String::new();
    let drawn = paint(&SVGBackend::with_string(&mut text, picture.size()).into_drawing_area(), picture);
    drawn.map_err(|e| BenchError::transport(&format!("drawing {stem}"), e))?;
    // A page has no XML declaration inside.
    Ok(Some(text.split_once("<svg").map_or(String::new(), |(_, rest)| format!("<svg{rest}"))))
}

fn register_fonts() {
    static FONTS: Once = Once::new();
    FONTS.call_once(|| {
        // It fails only for a damaged font, which then shows as an error of the first text.
        let _ = register_font(FONT, FontStyle::Normal, dejavu::sans::regular());
    });
}

fn paint<B: DrawingBackend>(area: &DrawingArea<B, Shift>, picture: &Picture) -> Result<(), String> {
    area.fill(&WHITE).map_err(|e| e.to_string())?;
    match picture {
        Picture::Chart(chart) => {
            let (left, right) = area.split_horizontally(SIZE.0 - LEGEND);
            lines(&left, chart, &[]).and_then(|()| legend(&right, chart, &[])).map_err(|e| e.to_string())?;
        }
        Picture::MarkedChart(MarkedChart { chart, marks }) => {
            let (left, right) = area.split_horizontally(SIZE.0 - LEGEND);
            lines(&left, chart, marks).and_then(|()| legend(&right, chart, marks)).map_err(|e| e.to_string())?;
        }
        Picture::Bars(bars) => bar_rows(area, bars).map_err(|e| e.to_string())?,
    }
    area.present().map_err(|e| e.to_string())
}

type Drawn<B> = Result<(), DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>>;

fn lines<B: DrawingBackend>(area: &DrawingArea<B, Shift>, chart: &Chart, marks: &[(f64, String)]) -> Drawn<B> {
    let (x_axis, y_axis) = (chart.x.1, chart.y.1);
    let extent = |places: &mut dyn Iterator<Item = f64>| {
        places.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), place| (low.min(place), high.max(place)))
    };
    let points = || chart.series.iter().flat_map(|series| series.points.iter());
    let (x_low, x_high) = extent(&mut points().map(|(x, _)| x_axis.place(*x)));
    let (y_low, y_high) = extent(&mut points().flat_map(|(_, s)| [y_axis.place(s.min), y_axis.place(s.max)]));
    let (x_range, y_range) = (x_axis.range(x_low, x_high), y_axis.range(y_low, y_high));
    let (x_labels, y_labels) = (x_axis.labels(&x_range), y_axis.labels(&y_range));
    let (bottom, top) = (y_range.start, y_range.end);
    let mut context = ChartBuilder::on(area)
        .caption(&chart.title, (FONT, 22))
        .margin(14)
        .x_label_area_size(48)
        .y_label_area_size(84)
        .build_cartesian_2d(x_range, y_range)?;
    context
        .configure_mesh()
        .x_desc(chart.x.0)
        .y_desc(chart.y.0)
        .axis_desc_style((FONT, 16))
        .label_style((FONT, 14))
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .x_labels(x_labels)
        .y_labels(y_labels)
        .x_label_formatter(&|place| x_axis.label(*place))
        .y_label_formatter(&|place| y_axis.label(*place))
        .draw()?;
    for (number, (at, _)) in marks.iter().enumerate() {
        let x = x_axis.place(*at);
        context.draw_series([PathElement::new([(x, bottom), (x, top)], BLACK.mix(0.35).stroke_width(1))])?;
        // Numbers of moments that are close together stand below each other.
        let y = top - (top - bottom) * 0.03 * (number % 4) as f64;
        context.draw_series([Text::new(format!(" {}", number + 1), (x, y), (FONT, 13))])?;
    }
    for series in chart.series.iter().filter(|series| !series.points.is_empty()) {
        let colour = colour(series.mechanism);
        let style = colour.stroke_width(2);
        let places: Vec<(f64, f64)> =
            series.points.iter().map(|(x, s)| (x_axis.place(*x), y_axis.place(s.median))).collect();
        if series.dashed {
            context.draw_series(DashedLineSeries::new(places.iter().copied(), 7, 5, style))?;
        } else {
            context.draw_series(LineSeries::new(places.iter().copied(), style))?;
        }
        // The range of the runs as a thin bar through each point.
        context.draw_series(series.points.iter().map(|(x, s)| {
            let x = x_axis.place(*x);
            PathElement::new([(x, y_axis.place(s.min)), (x, y_axis.place(s.max))], colour.mix(0.6).stroke_width(1))
        }))?;
        context.draw_series(places.iter().map(|place| Circle::new(*place, 3, colour.filled())))?;
    }
    Ok(())
}

/// One line for each series that has data, in the order of their last points, so that names stand about where lines end.
fn legend<B: DrawingBackend>(area: &DrawingArea<B, Shift>, chart: &Chart, marks: &[(f64, String)]) -> Drawn<B> {
    let mut shown: Vec<&Series> = chart.series.iter().filter(|series| !series.points.is_empty()).collect();
    let end = |series: &Series| series.points.last().map_or(0.0, |(_, s)| s.median);
    shown.sort_by(|a, b| end(b).total_cmp(&end(a)));
    let below = 70 + 24 * (shown.len() as i32 + 1);
    for (row, series) in shown.into_iter().enumerate() {
        let colour = colour(series.mechanism);
        let y = 70 + 24 * row as i32;
        let strokes: &[(i32, i32)] = if series.dashed { &[(4, 12), (18, 26)] } else { &[(4, 26)] };
        for (from, to) in strokes {
            area.draw(&PathElement::new([(*from, y), (*to, y)], colour.stroke_width(3)))?;
        }
        area.draw(&Text::new(series.name.clone(), (34, y - 5), (FONT, 14)))?;
    }
    // All of them stay in the picture.
    let room = area.dim_in_pixel().1 as i32 - 20 - below;
    let step = f64::from(room.max(0)) / marks.len().max(2).saturating_sub(1) as f64;
    for (number, (_, what)) in marks.iter().enumerate() {
        let y = below + (step.min(18.0) * number as f64) as i32;
        area.draw(&Text::new(format!("{} {what}", number + 1), (4, y), (FONT, 11)))?;
    }
    Ok(())
}

fn bar_rows<B: DrawingBackend>(area: &DrawingArea<B, Shift>, bars: &Bars) -> Drawn<B> {
    let rows: usize = bars.groups.iter().map(|(_, bars)| bars.len() + 1).sum();
    let axis = bars.x.1;
    let values = || bars.groups.iter().flat_map(|(_, bars)| bars).map(|bar| bar.value);
    let low = values().map(|s| axis.place(s.min)).fold(f64::INFINITY, f64::min);
    let high = values().map(|s| axis.place(s.max)).fold(f64::NEG_INFINITY, f64::max);
    let tight = axis.range(low, high);
    // Room for the figure behind the longest bar.
    let range = tight.start..high + (high - tight.start) * 0.15 + f64::MIN_POSITIVE;
    let (start, labels) = (range.start, axis.labels(&range));
    let mut context = ChartBuilder::on(area)
        .caption(&bars.title, (FONT, 22))
        .margin(14)
        .x_label_area_size(48)
        .y_label_area_size(NAMES)
        .build_cartesian_2d(range, 0.0..rows as f64)?;
    context
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .x_desc(bars.x.0)
        .axis_desc_style((FONT, 16))
        .label_style((FONT, 14))
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .x_labels(labels)
        .x_label_formatter(&|place| axis.label(*place))
        .draw()?;
    let inside = context.plotting_area();
    // Names stand left of the axis, where places are pixels.
    let beside = |text: &str, row: f64, indent: i32| {
        let (_, y) = inside.map_coordinate(&(start, row - 0.5));
        area.draw(&Text::new(text.to_owned(), (18 + indent, y - 5), (FONT, 14)))
    };
    let mut row = rows as f64;
    for (heading, group) in &bars.groups {
        beside(heading, row, 0)?;
        row -= 1.0;
        for bar in group {
            let colour = colour(bar.mechanism);
            let [median, min, max] = [bar.value.median, bar.value.min, bar.value.max].map(|value| axis.place(value));
            beside(&bar.name, row, 16)?;
            inside.draw(&Rectangle::new([(start, row - 0.15), (median, row - 0.85)], colour.filled()))?;
            inside.draw(&PathElement::new([(min, row - 0.5), (max, row - 0.5)], BLACK.stroke_width(1)))?;
            inside.draw(&Text::new(format!("  {}", bar.label), (max.max(median), row - 0.32), (FONT, 13)))?;
            row -= 1.0;
        }
    }
    Ok(())
}
