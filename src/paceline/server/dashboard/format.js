// Numbers as words, and the arithmetic that the charts need. Knows no page: it runs anywhere.

export const NONE = "–"; // where nothing is known

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// Three digits that count; from 10,000 on in thousands, from a million on in millions.
export function short(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 999_500) return `${digits(value / 1e6)}M`;
  if (size >= 9_999.5) return `${digits(value / 1e3)}k`;
  return Number.isInteger(value) ? String(value) : digits(value);
}

function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
}

// A count in full, its thousands apart.
export function count(value) {
  return isNumber(value) ? String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, "\u2009") : NONE;
}

export function percent(share) {
  if (!isNumber(share)) return NONE;
  const value = share * 100;
  return `${value.toFixed(value > 0 && value < 9.95 ? 1 : 0)} %`;
}

// A latency, in the unit that suits it.
export function latency(seconds) {
  if (!isNumber(seconds)) return NONE;
  return seconds < 0.9995 ? `${digits(seconds * 1e3)} ms` : `${digits(seconds)} s`;
}

// A length of time as people say it.
export function age(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.floor(whole / 60)} min`;
  if (whole < 172_800)
    return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86_400)} days`;
}

// Unix seconds as the time of day, 14:03:09.
export function clock(seconds) {
  const when = new Date(seconds * 1000);
  const parts = [when.getHours(), when.getMinutes(), when.getSeconds()];
  return parts.map((part) => String(part).padStart(2, "0")).join(":");
}

// Multiples of 1, 2 or 5 times a power of ten from 0 to `end`: as many as fit, `most` above 0 and
// at least one. whole: only whole numbers.
export function ticks(end, most, whole = false) {
  const power = 10 ** Math.floor(Math.log10(end / most));
  const sizes = [0.5, 1, 2, 5, 10]
    .map((factor) => factor * power)
    .filter((size) => !whole || size >= 1);
  const within = sizes.filter((size) => size <= end);
  const step = within.find((size) => Math.floor(end / size) <= most) ?? within.at(-1) ?? 1;
  const found = [];
  for (let i = 0; i * step <= end * 1.001; i += 1) found.push(i * step);
  return found;
}

// Words of a round number without zeros behind the point: 10.0k is 10k.
export function plain(words) {
  return words.replace(/\.(\d*?)0+(?!\d)/, (_, kept) => (kept ? `.${kept}` : ""));
}

// The sample nearest to a time; null without samples.
export function nearest(samples, time) {
  let best = null;
  for (const sample of samples) {
    if (best === null || Math.abs(sample.t - time) < Math.abs(best.t - time)) best = sample;
  }
  return best;
}

// Mean, least and largest draft length of a second's rounds, {"k": rounds}; null without rounds.
export function draftLengths(rounds) {
  const pairs = Object.entries(rounds)
    .map(([k, n]) => [Number(k), n])
    .filter(([, n]) => n > 0);
  const total = pairs.reduce((sum, [, n]) => sum + n, 0);
  if (!total) return null;
  const lengths = pairs.map(([k]) => k);
  const mean = pairs.reduce((sum, [k, n]) => sum + k * n, 0) / total;
  return { mean, least: Math.min(...lengths), largest: Math.max(...lengths) };
}

// What some of the counts make of all, null where there are none.
export function share(counts, names) {
  const total = Object.values(counts).reduce((sum, n) => sum + n, 0);
  return total ? names.reduce((sum, name) => sum + (counts[name] ?? 0), 0) / total : null;
}
