"""Opens a report in headless Chromium, reads the verdict, sorts the table, hovers the Gantt, and
asserts that the console is clean and that nothing was requested."""

import pathlib
import sys

import axe
from driver import Driver


# The page of a large space, whose chart has thousands of points.
LARGE = "large.report"


def check(driver, report):
    driver.go(report.resolve().as_uri())
    verdict = driver.run("return document.getElementById('verdict').innerText")
    if not driver.run("return document.getElementById('alternatives') !== null"):
        # A comparison, or the page of a search in which nothing fits: text and tables alone.
        fits_everywhere(driver, report, bars=False)
        quiet(driver)
        return verdict, "-"
    assert "FIT" in verdict.upper() and "GiB" in verdict, f"verdict: {verdict!r}"

    column = """
        const table = document.getElementById('alternatives');
        return [...table.tBodies[0].rows].map(row => row.cells[arguments[0]].textContent);"""
    heads = driver.run("return [...document.querySelectorAll('#alternatives th')].map(h => h.textContent)")
    memory = next(i for i, head in enumerate(heads) if "memory" in head.lower())
    click = """
        const head = document.querySelectorAll('#alternatives th')[arguments[0]];
        (head.querySelector('button') || head).click();
        return head.getAttribute('aria-sort');"""
    assert driver.run(click, memory) in ("ascending", "descending"), "sorting is not announced"
    first = [float(cell.split()[0].replace(",", "")) for cell in driver.run(column, memory)]
    driver.run(click, memory)
    second = [float(cell.split()[0].replace(",", "")) for cell in driver.run(column, memory)]
    assert first in (sorted(first), sorted(first, reverse=True)), f"not sorted: {first}"
    assert sorted(first) == sorted(second) and (len(set(first)) < 2 or first != second), "one order only"

    drawn = driver.run("""
        return [...document.querySelectorAll('#pareto-chart, #memory-chart')].map((chart) => {
            const canvas = chart.querySelector('canvas');
            const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            return new Set(data.filter((_, at) => at % 4 === 0)).size;
        });""")
    assert drawn and all(colours > 2 for colours in drawn), f"a chart is empty: {drawn}"

    points = driver.run("return JSON.parse(document.getElementById('pareto-data').textContent).points.length")
    took = driver.run("return performance.getEntriesByName('pareto drawn')[0].duration")
    assert took < 300, f"drawing {points} strategies takes {took:.0f} ms"
    assert report.stem != LARGE or points >= 4000, f"only {points} strategies are drawn"
    size = report.stat().st_size
    assert size < 1_500_000, f"the page has {size} bytes"

    box = driver.run("""
        const gantt = document.getElementById('gantt-canvas');
        gantt.scrollIntoView({block: 'center'});
        const box = gantt.getBoundingClientRect();
        return [box.left, box.top, box.width, box.height];""")
    seen = ""
    for share in (0.3, 0.4, 0.5, 0.6, 0.7):
        for down in (0.15, 0.3, 0.5):
            driver.move(box[0] + box[2] * share, box[1] + box[3] * down)
            seen = driver.run("const t = document.getElementById('tip'); return t && !t.hidden ? t.textContent : ''")
            if seen:
                break
        if seen:
            break
    assert "ms" in seen or "s" in seen, "hovering the Gantt shows nothing"

    fits_everywhere(driver, report, bars=True)
    quiet(driver)
    return verdict, f"{seen.splitlines()[0]}; {points} strategies drawn in {took:.0f} ms; {size / 1e6:.2f} MB"


def quiet(driver):
    """Nothing was requested, and the console is clean."""
    requests = driver.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert not [r for r in requests if not r.startswith(("data:", "blob:"))], f"requests: {requests}"
    errors = driver.errors()
    assert not errors, f"console: {errors}"


def fits_everywhere(driver, report, bars):
    """Nothing is wider than the screen on a phone, a tablet, a laptop and a wide screen, in the light and in the dark; on
    paper bars and headers are there, and what is folded is open."""

    page = report.resolve().as_uri()
    for width in (360, 768, 1440, 2560):
        for scheme in ("light", "dark"):
            driver.devtools("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            driver.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            driver.go(page)
            wide = driver.run("return [document.documentElement.scrollWidth, innerWidth]")
            assert wide[0] <= wide[1], f"{wide[0]} pixels on a screen of {width}"
    driver.devtools("Emulation.setEmulatedMedia", media="print", features=[])
    paper = driver.run("""
        const shown = (what) => [...document.querySelectorAll(what)].filter(
            (part) => part.getBoundingClientRect().height > 0 && getComputedStyle(part).display !== 'none').length;
        dispatchEvent(new Event('beforeprint'));
        const folded = document.querySelectorAll('details:not([open])').length;
        dispatchEvent(new Event('afterprint'));
        return {bars: shown('.track i'), exact: getComputedStyle(document.body).printColorAdjust,
                heads: shown('#alternatives th button'), folded, copies: shown('[data-copy]')};""")
    assert paper["exact"] == "exact" and paper["folded"] == 0 and paper["copies"] == 0, f"on paper: {paper}"
    assert not bars or (paper["bars"] > 4 and paper["heads"] > 4), f"bars and headers on paper: {paper}"
    driver.devtools("Emulation.setEmulatedMedia", media="", features=[])
    driver.devtools("Emulation.clearDeviceMetricsOverride")
    driver.go(page)


def main():
    report = pathlib.Path(sys.argv[1])
    driver = Driver()
    try:
        verdict, seen = check(driver, report)
        accessible = axe.check(driver)
        driver.go(report.resolve().as_uri())
        picture = report.with_suffix(".png")
        driver.run("window.scrollTo(0, 0)")
        driver.shoot(picture)
    finally:
        driver.close()
    print(f"{report.name}: {verdict.splitlines()[0]}; hover: {seen}; {accessible}; 1 passed, 0 failed")


if __name__ == "__main__":
    main()
