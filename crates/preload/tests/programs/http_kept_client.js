// One request after the other over two kept connections: each waits for the answer to the one before, and each answer is checked. Says what
// came back, and then asks on until its standard input ends. With SECONDS it asks the same requests again and again for so long, over the same connections, and prints a line for each time.
// Usage: http_kept_client.js ADDRESS PORT REQUESTS [SECONDS]
const http = require('http');
const crypto = require('crypto');
const agent = new http.Agent({ keepAlive: true, maxSockets: 2 });
const digest = (bytes) => crypto.createHash('sha256').update(bytes).digest('hex');
const noise = (size) => {
  const bytes = Buffer.alloc(size);
  for (let i = 0; i < size; i++) bytes[i] = (i * 2654435761) >>> 24;
  return bytes;
};
const ask = (i) => new Promise((resolve, reject) => {
  const size = (i * 37) % 5000;
  const sent = i % 2 ? undefined : Buffer.alloc((i * 131) % 20000, i);
  const path = sent ? `/echo/${i}` : `/noise/${size}`;
  const options = { host: process.argv[2], port: Number(process.argv[3]), path, agent, method: sent ? 'POST' : 'GET' };
  const request = http.request(options, (response) => {
    const hash = crypto.createHash('sha256');
    response.on('data', (part) => hash.update(part));
    response.on('end', () => {
      const got = hash.digest('hex');
      if (got === digest(sent || noise(size))) resolve(`${path} ${response.statusCode} ${got}`);
      else reject(new Error(`${path}: a wrong answer`));
    });
  });
  request.on('error', reject);
  request.end(sent);
});
const askAll = async (requests) => {
  const lines = await Promise.all([0, 1].map(async (which) => {
    const answers = [];
    for (let i = which; i < requests; i += 2) answers.push(await ask(i));
    return answers.join('\n');
  }));
  return lines.join('\n');
};
(async () => {
  const [requests, seconds] = [Number(process.argv[4]), Number(process.argv[5] || 0)];
  if (seconds) {
    const end = Date.now() + 1000 * seconds;
    for (let time = 0; Date.now() < end; time++) {
      console.log(`${time}: ${requests} answers, ${digest(await askAll(requests))}`);
      // The connections come to rest in between.
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  } else {
    console.log(await askAll(requests));
    let hasEnded = false;
    process.stdin.on('end', () => { hasEnded = true; }).resume();
    while (!hasEnded) await askAll(20);
  }
  agent.destroy();
})();
