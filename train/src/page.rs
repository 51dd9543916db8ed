//! Pages that stand alone: one HTML file with its style, charts and numbers inside, which opens from disk and asks no network for anything.
//!
//! ```
//! use kiln::page::{Axis, Bar, Chart, Page, number};
//! let mut page = Page::new("Passes of a step");
//! page.text("Measured round by round.");
//! page.table("Receipts", &["pass", "ms"], &[vec!["bf16".into(), number(1.5, "1.5 ms")]]);
//! let bars = vec![Bar { name: "bf16".into(), value: 1.31, low: Some(1.28), high: Some(1.34), ..Bar::default() }];
//! page.chart("Gain", "more is faster", &Chart::Bars { x: Axis::new("times as fast"), bars });
//! assert!(page.html().contains("<table>"));
//! ```

use serde::Serialize;
use serde_json::Value;

/// What is drawn; `page/charts.js` draws it, with a table of the numbers below.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Chart {
    /// Lines and dots: curves; with logarithmic axes a roofline.
    Plot { x: Axis, y: Axis, series: Vec<Series> },
    /// Horizontal bars from zero, or over a logarithmic axis, with an interval where there is one.
    Bars { x: Axis, bars: Vec<Bar> },
    /// Series stacked upon each other, all with a value for each of `at`.
    Area { x: Axis, y: Axis, at: Vec<f64>, series: Vec<Layer> },
    /// Rectangles colored by group: what lies in memory where, and from when to when.
    Boxes { x: Axis, y: Axis, boxes: Vec<Boxed> },
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct Axis {
    pub label: String,
    /// `bytes`, `share` (shown in percent), `seconds`, or empty for a plain number.
    pub unit: &'static str,
    pub log: bool,
    /// From where to where it goes; by the numbers if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<(f64, f64)>,
}

impl Axis {
    pub fn new(label: &str) -> Axis {
        Axis { label: label.into(), ..Axis::default() }
    }

    pub fn unit(self, unit: &'static str) -> Axis {
        Axis { unit, ..self }
    }

    pub fn range(self, low: f64, high: f64) -> Axis {
        Axis { range: Some((low, high)), ..self }
    }

    pub fn log(self) -> Axis {
        Axis { log: true, ..self }
    }
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct Series {
    pub name: String,
    /// x and y; a dot may have a name of its own.
    pub points: Vec<Point>,
    /// Dots instead of a line.
    pub dots: bool,
    pub dashed: bool,
    /// A line to compare with, such as a roof: the arrow keys do not stop at its points.
    pub guide: bool,
    /// Which color; the series' place if not given. Twelve, then the same with other dashes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub color: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Point {
    At(f64, f64),
    Named(f64, f64, String),
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct Bar {
    pub name: String,
    pub value: f64,
    pub low: Option<f64>,
    pub high: Option<f64>,
    /// Shown at the pointer, and in the table.
    pub note: String,
    /// Drawn pale: within noise, or not applied.
    pub faint: bool,
    /// What stands in the place of the value.
    pub shown: Option<String>,
    pub color: usize,
}

/// A series of stacked areas.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Layer {
    pub name: String,
    pub values: Vec<f64>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct Boxed {
    pub name: String,
    pub group: String,
    pub x: (f64, f64),
    pub y: (f64, f64),
}

/// A page in the making.
pub struct Page {
    title: String,
    body: String,
    charts: usize,
    /// What this page alone needs.
    style: &'static str,
    script: &'static str,
}

impl Page {
    pub fn new(title: &str) -> Page {
        Page { title: title.into(), body: String::new(), charts: 0, style: "", script: "" }
    }

    pub fn heading(&mut self, text: &str) -> &mut Page {
        self.html_of(&format!("<h2>{}</h2>\n", escape(text)))
    }

    pub fn text(&mut self, text: &str) -> &mut Page {
        self.html_of(&format!("<p>{}</p>\n", escape(text)))
    }

    /// Text as a terminal shows it.
    pub fn plain(&mut self, text: &str) -> &mut Page {
        self.html_of(&format!("<pre>{}</pre>\n", escape(text)))
    }

    pub fn table<C: Clone + Into<Cell>>(&mut self, caption: &str, headers: &[&str], rows: &[Vec<C>]) -> &mut Page {
        let head: String = headers.iter().map(|h| format!("<th scope=\"col\">{}</th>", escape(h))).collect();
        let cell = |cell: &C| match cell.clone().into() {
            Cell::Text(text) => format!("<td>{}</td>", escape(&text)),
            Cell::Number(value, shown) => format!("<td class=\"number\" data-value=\"{value}\">{}</td>", escape(&shown)),
        };
        let rows: String = rows.iter().map(|row| format!("<tr>{}</tr>\n", row.iter().map(cell).collect::<String>())).collect();
        let caption = escape(caption);
        // A wide table scrolls by itself, with the keyboard too.
        self.html_of(&format!(
            "<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"{caption}\"><table><caption>{caption}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n"
        ))
    }

    /// A chart under its title, with a line on how to read it.
    pub fn chart(&mut self, title: &str, about: &str, chart: &Chart) -> &mut Page {
        self.charts += 1;
        let id = format!("chart-{}", self.charts);
        let value = serde_json::to_value(chart).expect("a chart is plain data");
        self.html_of(&format!(
            "<figure data-chart=\"{id}\"><figcaption>{}<small>{}</small></figcaption></figure>\n",
            escape(title),
            escape(about)
        ))
        .data(&id, &value)
    }

    /// JSON for scripts: `kiln.data(id)` reads it.
    pub fn data(&mut self, id: &str, value: &Value) -> &mut Page {
        self.html_of(&format!("<script type=\"application/json\" id=\"{}\">{}</script>\n", escape(id), json(value)))
    }

    /// HTML as it is. It is a program's own: text that was read is never `'static`.
    pub fn raw(&mut self, html: &'static str) -> &mut Page {
        self.html_of(html)
    }

    /// HTML in which what was read has been escaped.
    fn html_of(&mut self, html: &str) -> &mut Page {
        self.body += html;
        self
    }

    /// A style and a script that this page has besides those of every page.
    pub fn own(&mut self, style: &'static str, script: &'static str) -> &mut Page {
        (self.style, self.script) = (style, script);
        self
    }

    /// The whole file. Its policy forbids the browser to fetch anything that is not of the page itself.
    pub fn html(&self) -> String {
        self.with_policy("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:")
    }

    /// The same for a page that is served, and asks its own server for more.
    pub fn served(&self) -> String {
        self.with_policy(
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src 'self' data:; connect-src 'self'",
        )
    }

    fn with_policy(&self, policy: &str) -> String {
        let (title, body, style, script) = (escape(&self.title), &self.body, self.style, self.script);
        let (css, charts) = (include_str!("page/page.css"), include_str!("page/charts.js"));
        let own = if script.is_empty() { String::new() } else { format!("<script>\n{script}</script>\n") };
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<link rel=\"icon\" href=\"data:,\">\n<title>{title}</title>\n\
             <style>\n{css}{style}</style>\n<script>\n{charts}</script>\n</head>\n<body>\n<a class=\"skip\" href=\"#main\">To the content</a>\n\
             <header><h1>{title}</h1><button type=\"button\" id=\"theme\">Dark colors</button></header>\n\
             <main id=\"main\">\n{body}</main>\n{own}</body>\n</html>\n"
        )
    }
}

/// A cell of `Page::table`.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    Text(String),
    /// Its value, which it keeps for scripts, and how it is shown: aligned to the right.
    Number(f64, String),
}

impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell::Text(text)
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::Text(text.into())
    }
}

/// A cell that is a number.
pub fn number(value: f64, shown: &str) -> Cell {
    Cell::Number(value, shown.into())
}

/// Text for HTML, also between quotes. What a terminal would obey is shown here, too: it could turn a line around.
pub fn escape(text: &str) -> String {
    crate::report::shown(text).chars().fold(String::with_capacity(text.len()), |mut out, c| {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c => out.push(c),
        }
        out
    })
}

/// JSON that may stand in a script: nothing in it ends the script or begins a comment.
pub fn json(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026").replace(['\u{2028}', '\u{2029}'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_wrote_stays_text() {
        // As a cell of numbers begins.
        const TAKEN: &str = "<td class=\"number\" data-value=\"1\"><img src=x onerror=alert(1)>";
        let mut page = Page::new("a <b> & \"c\"");
        page.heading("<i>").text("<u>").plain("</pre>").table("<s>", &["<th>"], &[vec!["<td>".into(), number(0.1, "<n>")]]);
        page.table("", &[], &[vec![TAKEN]]).text("turned \u{202e}around\u{1b}");
        let hostile = "</script><script>alert(1)</script><!--\u{2028}";
        let bars = vec![Bar { name: hostile.into(), ..Bar::default() }];
        page.chart("<t>", "<a>", &Chart::Bars { x: Axis::new("<x>"), bars });
        let html = page.html();
        for own in
            ["<i>", "<u>", "</pre></pre>", "<s>", "<n>", "<t>", "<a>", "<x>", "alert(1)</script>", "<!--", "<img", "\u{202e}", "\u{1b}"]
        {
            assert!(!html.contains(own), "{own}");
        }
        assert!(html.contains("<td>&lt;td class=&quot;number&quot;") && html.contains("turned \\u{202e}around\\u{1b}"));
        assert!(html.contains("a &lt;b&gt; &amp; &quot;c&quot;") && html.contains("data-value=\"0.1\">&lt;n&gt;<"));
        let inside = html.split("id=\"chart-1\">").nth(1).unwrap().split("</script>").next().unwrap();
        let read: Value = serde_json::from_str(inside).unwrap();
        assert_eq!(read["bars"][0]["name"], hostile.replace('\u{2028}', " "), "what is embedded is read as it was");
    }

    #[test]
    fn a_page_names_no_other_place() {
        let html = Page::new("t").html();
        // The name of SVG's elements is no place.
        let places = html.replace("http://www.w3.org/2000/svg", "");
        for way in ["http:", "https:", "src=\"", "@import", "url(h"] {
            assert!(!places.contains(way), "{way}");
        }
        assert!(html.contains("default-src 'none'") && !html.contains("connect-src"));
        assert!(Page::new("t").served().contains("connect-src 'self'"));
    }

    /// Every color stands out from the page, and no two are alike, in both schemes.
    #[test]
    fn colors_are_told_apart() {
        let css = include_str!("page/page.css");
        let schemes: Vec<&str> = css.split(":root").skip(1).take(2).map(|part| part.split('}').next().unwrap()).collect();
        for scheme in schemes {
            let named = |name: &str| {
                let value = scheme.split(&format!("--{name}: #")).nth(1).unwrap_or_else(|| panic!("{name}"));
                u32::from_str_radix(&value[..6], 16).unwrap().to_be_bytes()
            };
            // Linear light of red, green and blue.
            let light = |c: [u8; 4]| {
                [c[1], c[2], c[3]].map(|v| v as f64 / 255.0).map(|v| if v <= 0.04045 { v / 12.92 } else { ((v + 0.055) / 1.055).powf(2.4) })
            };
            let luminance = |c| light(c).iter().zip([0.2126, 0.7152, 0.0722]).map(|(v, w)| v * w).sum::<f64>() + 0.05;
            // Oklab, in which distances are as people see them.
            let lab = |c| {
                let by = |v: [f64; 3], m: [[f64; 3]; 3]| m.map(|row| row.iter().zip(v).map(|(a, b)| a * b).sum::<f64>());
                let cones = by(light(c), [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]);
                by(cones.map(f64::cbrt), [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
            };
            let colors: Vec<[u8; 4]> = (0..12).map(|i| named(&format!("c{i}"))).collect();
            for (i, a) in colors.iter().enumerate() {
                let (bright, dim) = (luminance(*a).max(luminance(named("back"))), luminance(*a).min(luminance(named("back"))));
                assert!(bright / dim > 3.0, "c{i}: {:.1}", bright / dim);
                for (j, b) in colors.iter().enumerate().take(i) {
                    let apart = lab(*a).iter().zip(lab(*b)).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
                    assert!(apart > 0.08, "c{i} and c{j}: {apart:.3}");
                }
            }
        }
    }

    #[test]
    fn numbers_that_are_not_finite_are_null() {
        let points = vec![Point::At(1.0, f64::NAN), Point::Named(2.0, 0.5, "two".into())];
        let chart =
            Chart::Plot { x: Axis::new("x").log(), y: Axis::new("y").unit("bytes"), series: vec![Series { points, ..Series::default() }] };
        let value = serde_json::to_value(chart).unwrap();
        assert_eq!(value["series"][0]["points"], serde_json::json!([[1.0, null], [2.0, 0.5, "two"]]));
        assert_eq!((&value["kind"], &value["x"]["log"], &value["y"]["unit"]), (&"plot".into(), &true.into(), &"bytes".into()));
    }
}
