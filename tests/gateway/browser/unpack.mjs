// node unpack.mjs FOLDER: unpacks the browser that @sparticuz/chromium carries, and its libraries and fonts, there.
import { createReadStream, createWriteStream } from "node:fs";
import { pipeline } from "node:stream/promises";
import { createBrotliDecompress } from "node:zlib";

const [folder] = process.argv.slice(2);
for (const name of ["chromium", "al2023.tar", "fonts.tar", "swiftshader.tar"]) {
  const packed = new URL(`node_modules/@sparticuz/chromium/bin/${name}.br`, import.meta.url);
  await pipeline(createReadStream(packed), createBrotliDecompress(), createWriteStream(`${folder}/${name}`, { mode: 0o755 }));
}
