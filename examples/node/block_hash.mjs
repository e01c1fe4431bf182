// The identity of KV blocks, as proto/README.md defines it.
//
//   node block_hash.mjs ../../proto/block_hash_vectors.json      checks the test vectors
import { readFileSync } from "node:fs";
import { blake2b } from "@noble/hashes/blake2.js";
import { bytesToHex, concatBytes, hexToBytes, utf8ToBytes } from "@noble/hashes/utils.js";

const HASH_BYTES = 16;
const NAMESPACE_KEY = utf8ToBytes("baton.namespace.1");

function uint32(value) {
  const bytes = new Uint8Array(4);
  new DataView(bytes.buffer).setUint32(0, value, true);
  return bytes;
}

export function cacheNamespace(modelDigest, blockSize, adapter, salt) {
  const parts = [modelDigest, uint32(blockSize), utf8ToBytes(adapter), utf8ToBytes(salt)];
  const message = concatBytes(...parts.flatMap((part) => [uint32(part.length), part]));
  return blake2b(message, { dkLen: HASH_BYTES, key: NAMESPACE_KEY });
}

export function hashBlocks(parent, tokenIds, blockSize) {
  const hashes = [];
  for (let start = 0; start + blockSize <= tokenIds.length; start += blockSize) {
    const block = concatBytes(...tokenIds.slice(start, start + blockSize).map(uint32));
    parent = blake2b(block, { dkLen: HASH_BYTES, key: parent });
    hashes.push(parent);
  }
  return hashes;
}

function check(name, actual, expected) {
  if (actual !== expected) {
    throw new Error(`${name}: ${actual} is not the expected ${expected}`);
  }
}

const { namespaces, chains } = JSON.parse(readFileSync(process.argv[2], "utf8"));
for (const [index, vector] of namespaces.entries()) {
  const { model_digest, block_size, adapter, salt, namespace } = vector;
  const actual = cacheNamespace(hexToBytes(model_digest), block_size, adapter, salt);
  check(`namespace ${index}`, bytesToHex(actual), namespace);
}
for (const [index, { parent, token_ids, block_size, block_hashes }] of chains.entries()) {
  const actual = hashBlocks(hexToBytes(parent), token_ids, block_size).map(bytesToHex);
  check(`chain ${index}`, actual.join(), block_hashes.join());
}
console.log(`${namespaces.length} namespaces and ${chains.length} chains agree`);
