// Answers with what was sent, or with noise of a given size. Usage: http_server.js ADDRESS PORT
const http = require('http');
http.createServer((request, response) => {
  const size = /^\/noise\/(\d+)$/.exec(request.url);
  if (size) {
    const body = Buffer.alloc(Number(size[1]));
    for (let i = 0; i < body.length; i++) body[i] = (i * 2654435761) >>> 24;
    response.end(body);
  } else {
    response.writeHead(200, { 'X-Method': request.method });
    request.pipe(response);
  }
}).listen(Number(process.argv[3]), process.argv[2]);
